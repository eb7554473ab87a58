"""The table of `foreign.py`."""

from __future__ import annotations

from typing import Any

from tpu_serve.cli.foreign import Foreign


def _refused(flags: str, says: str, *, takes: int | str = 1, done: str | None = None) -> Foreign:
    return Foreign(flags=tuple(flags.split()), says=says, takes=takes, done=done)


def _noted(flags: str, says: str, *, takes: int | str = 1, done: str | None = None) -> Foreign:
    return Foreign(flags=tuple(flags.split()), says=says, takes=takes, done=done, note=True)


def _always(flags: str) -> Foreign:
    """A switch that asks for what is done in any case."""
    return Foreign(flags=tuple(flags.split()), takes=0, done="")


def _means(flags: str, **sets: Any) -> Foreign:
    return Foreign(flags=tuple(flags.split()), takes=0, sets=sets)


_NO_EAGER = "means nothing here: JAX runs compiled programs only. They are kept in --compile-cache-dir, so that later starts are quick"
_ONE_HOST = (
    "is not supported: the devices of one host serve together (--tensor-parallel-size N, --data-parallel-size N)"
)
_NO_LORA = "is not supported: merge the adapter into the checkpoint and serve that"
_NO_SPECULATION = "is not supported: there is no speculative decoding; leave it out"
_TEXT_ONLY = "has no effect: models are served with text only"
_BUCKETS = (
    "is not needed: batch sizes have no programs of their own. --token-buckets lists the token counts that get one"
)
_NO_TRANSFER = "is not supported: the KV cache stays on the devices of one server"

ENGINE_FLAGS = (
    # What happens in any case.
    _always("--enable-chunked-prefill --async-scheduling --enable-server-load-tracking --enable-metrics"),
    _always("--enable-prompt-tokens-details --disable-custom-all-reduce"),
    _refused("--tokenizer-mode", "is not known: the tokenizer is read from tokenizer.json", done="auto|hf|fast"),
    _refused("--runner --task --convert", "is not supported: models generate text here", done="auto|generate|none"),
    _refused("--model-impl", "is not supported: models are implemented here", done="auto"),
    _refused("--config-format", "is not supported: config.json in the form of transformers is read", done="auto|hf"),
    _refused(
        "--prefix-caching-hash-algo",
        "is not supported: pages of the prefix cache are found by SHA-256 of their tokens; leave it out",
        done="sha256|sha256_cbor",
    ),
    _refused(
        "--structured-outputs-config",
        "is not supported: structured outputs are made by llguidance, which needs no options; leave it out",
        done=r'\{\s*("backend"\s*:\s*"(auto|guidance)")?\s*\}',
    ),
    _refused(
        "--guided-decoding-backend --grammar-backend --structured-outputs-backend",
        "is not supported: structured outputs are made by llguidance; leave it out",
        done="auto|guidance|llguidance",
    ),
    _refused(
        "--precompile",
        "is not supported: every program is compiled at the start, once, and kept in --compile-cache-dir",
        done="full",
    ),
    # What would have to be done otherwise.
    _refused(
        "--no-enable-chunked-prefill --disable-chunked-prefill",
        "is not supported: prompts are always computed in chunks of at most --max-num-batched-tokens tokens; raise that to keep prompts whole",
        takes=0,
    ),
    _refused(
        "--no-async-scheduling --disable-overlap-schedule",
        "is not supported: the host always plans a step while the devices run the one before; answers are the same",
        takes=0,
    ),
    _refused("--no-enable-prompt-tokens-details", "is not supported: usage always counts cached tokens", takes=0),
    _refused(
        "--long-prefill-token-threshold",
        "is not supported: --max-num-batched-tokens bounds what one prompt takes of a step, and running answers come first",
        done="0",
    ),
    _refused("--max-num-partial-prefills --max-long-partial-prefills", "is not supported: leave it out", done="1"),
    _refused("--max-prefill-tokens", "is called --max-num-batched-tokens here"),
    _refused("--max-total-tokens", "is --num-pages here, in pages of --page-size tokens"),
    _refused("--schedule-policy", "is not known: use --scheduling-policy fcfs or priority", done="fcfs"),
    _refused(
        "--api-server-count -asc",
        "is not supported: one process takes all requests; --data-parallel-size N is about devices alone",
        done="1",
    ),
    _refused(
        "--pipeline-parallel-size -pp --pp-size",
        "is not supported: layers are not spread over devices; --tensor-parallel-size N spreads each layer",
        done="1",
    ),
    _refused(
        "--expert-parallel-size --ep-size",
        "is not needed: experts are split over all devices, --data-parallel-size times --tensor-parallel-size",
    ),
    _refused("--nnodes", _ONE_HOST, done="1"),
    _refused("--node-rank", _ONE_HOST, done="0"),
    _refused("--master-addr --master-port --dist-init-addr --data-parallel-address --data-parallel-rank", _ONE_HOST),
    _refused("--headless", _ONE_HOST, takes=0),
    _noted(
        "--distributed-executor-backend",
        "has no effect: one process drives all devices of the host",
        done="uni|mp",
    ),
    _noted("--enforce-eager --disable-cuda-graph", _NO_EAGER, takes=0),
    _refused(
        "--compilation-config -O",
        "is not supported: XLA compiles here. --token-buckets and --compile-cache-dir are what can be chosen",
    ),
    _refused("--batch-buckets --precompile-bs-paddings", _BUCKETS, takes="*"),
    _refused("--cudagraph-capture-sizes --cuda-graph-bs", _BUCKETS, takes="*"),
    _noted("--max-seq-len-to-capture", "means nothing here: programs depend on the number of tokens in a step only"),
    _refused(
        "--disable-precompile --skip-server-warmup",
        "is not supported: requests would wait for the compiler; programs are kept in --compile-cache-dir and compiled once, and "
        "--serve-while-compiling answers before all of them are there",
        takes=0,
    ),
    _means("--disable-radix-cache", enable_prefix_caching=False),
    _noted(
        "--trust-remote-code",
        "has no effect: code from a checkpoint is never run. A model whose family is built in needs none, others are refused",
        takes=0,
    ),
    _always("--no-trust-remote-code --no-enforce-eager --no-enable-lora --no-disable-radix-cache"),
    _refused("--download-dir", "is not an option: set HF_HUB_CACHE to the folder for downloads"),
    _refused("--hf-token", "is not an option, since every user of the machine could read it: set HF_TOKEN", takes="?"),
    _refused("--tokenizer-revision --code-revision", "is not supported: --revision is that of the tokenizer too"),
    _refused("--hf-config-path", "is not supported: --hf-overrides lays values over config.json"),
    _refused("--rope-scaling", "is written --hf-overrides '{\"rope_scaling\": …}' here"),
    _refused("--rope-theta", "is written --hf-overrides '{\"rope_theta\": …}' here"),
    _refused("--skip-tokenizer-init", "is not supported: requests and answers are texts", takes=0),
    _refused(
        "--device",
        "is not an option: JAX takes the devices that it finds; the environment variable JAX_PLATFORMS=cpu keeps it off a TPU",
        done="auto",
    ),
    _refused(
        "--cpu-offload-gb --swap-space", "is not supported: weights and KV cache stay on the devices", done=r"0(\.0*)?"
    ),
    _refused("--enable-lora", _NO_LORA, takes=0),
    _refused("--lora-modules --lora-paths", _NO_LORA, takes="+"),
    _refused("--max-loras --max-lora-rank --max-cpu-loras", _NO_LORA),
    _refused(
        "--speculative-config --speculative-model --num-speculative-tokens --speculative-algorithm", _NO_SPECULATION
    ),
    _refused("--kv-transfer-config --kv-events-config --kv-offloading-size --ec-transfer-config", _NO_TRANSFER),
    _refused("--additional-config", "is not supported: every option has a flag of its own (--help)"),
    _refused("--enable-sleep-mode", "is not supported: stop the server to free its devices", takes=0),
    _refused("--enable-dbo --enable-eplb", "is not supported: leave it out", takes=0),
    _noted("--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs --mm-processor-cache-gb", _TEXT_ONLY),
    _noted("--allowed-local-media-path", _TEXT_ONLY),
    _noted("--language-model-only --skip-mm-profiling", _TEXT_ONLY, takes=0),
    _noted("--max-parallel-loading-workers", "has no effect: weights are read by as many threads as there are cores"),
    _noted(
        "--disable-hybrid-kv-cache-manager", "has no effect: layers with a window keep what their window sees", takes=0
    ),
    _refused("--quantization-param-path", "is not supported: scales of the KV cache are computed per token and head"),
    _refused(
        "--logits-processors --logits-processor-pattern", "is not supported: code of a user's own is not run", takes="+"
    ),
)
"""About the engine: every command with engine options knows them."""

SERVER_FLAGS = (
    _refused(
        "--chat-template-content-format",
        "is not supported: a message's parts are joined to one text, which every template understands",
        done="auto|string",
    ),
    _always("--disable-log-requests"),
    _means("--log-requests", enable_log_requests=True),
    _always("--enable-reasoning --enable-per-request-metrics"),
    _refused("--log-level-http", "is called --uvicorn-log-level here"),
    _refused("--log-config-file", "is not supported: --log-level and --log-format choose what is logged and how"),
    _refused("--profiler-config", "is not supported: --profile-dir DIR turns on /start_profile and /stop_profile"),
    _refused("--collect-detailed-traces", "is not supported: a request's span has its figures already"),
    _refused("--return-tokens-as-token-ids", "is a field of requests here: return_tokens_as_token_ids", takes=0),
    _refused("--response-role", "is not supported: answers are the assistant's", done="assistant"),
    _noted("--disable-frontend-multiprocessing", "has no effect: the engine always has a process of its own", takes=0),
    _refused("--lora-extra-vocab-size --lora-dtype", _NO_LORA),
    _refused("--middleware", "is not supported: code of a user's own is not run"),
    _refused("--tool-parser-plugin --reasoning-parser-plugin", "is not supported: code of a user's own is not run"),
    _refused("--tool-server", "is not supported: tools are called by the client"),
    _refused("--watchdog-timeout", "is not supported: /health?deep=1 says whether the engine moves"),
)
"""About the HTTP server: `serve` knows them."""

VALUE_HINTS = {
    "quantization": {
        **dict.fromkeys(
            (
                "awq",
                "gptq",
                "awq_marlin",
                "gptq_marlin",
                "compressed-tensors",
                "modelopt",
                "modelopt_fp4",
                "mxfp4",
                "fbgemm_fp8",
            ),
            "a quantised checkpoint is recognised by itself: leave the flag out",
        ),
        **dict.fromkeys(
            ("bitsandbytes", "gguf", "torchao"),
            "this format is not read; the flag is for quantising an unquantised checkpoint: none, int8 or fp8",
        ),
        "w8a8_int8": "int8 is how this is called here",
    },
    "dtype": {
        **dict.fromkeys(
            ("half", "float16"),
            "no arithmetic in float16 on a TPU; bfloat16 has the same size, and a float16 checkpoint is converted",
        ),
        "float": "float32 is how this is called here",
    },
    "kv_cache_dtype": {
        "fp8_e5m2": "fp8 (e4m3) has a scale per token and head and needs no wider range",
        **dict.fromkeys(("bfloat16", "float16"), "auto keeps the model's own type"),
    },
    "load_format": {
        **dict.fromkeys(
            ("pt", "npcache", "bin", "gguf", "bitsandbytes"),
            "only safetensors files are read; convert the checkpoint to safetensors",
        ),
        **dict.fromkeys(
            ("runai_streamer", "tensorizer", "sharded_state", "fastsafetensors"),
            "safetensors files are streamed to the devices: leave the flag out",
        ),
        "mistral": "the folder must be in the form of transformers (config.json, model*.safetensors)",
    },
    "moe_backend": {"epmoe": "ragged is the one that comes nearest; auto chooses"},
}
"""By option: values of other programs, with what to write instead."""
