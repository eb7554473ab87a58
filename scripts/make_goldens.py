"""Writes the tiny checkpoints under tests/fixtures and the values that transformers computes from them.

Run by hand after `pip install -e .[golden]`: `python scripts/make_goldens.py`. Needs no network. Quantised weights are
dequantised by transformers, which wants accelerate for FP8. A fixture folder holds:

  config.json, generation_config.json, tokenizer.json, tokenizer_config.json, model.safetensors           as published models do
  v5_style/config.json    the same configuration as transformers 5 writes it
  manifest.json           versions, seed, margins, prompt texts
  golden.npz              float32 results from the weights as stored. For each prompt p of 0, 1, 2:
    prompt_p [T] token ids · logits_p [T, V] · greedy_p [N] the greedy continuation · greedy_gap_p [N] between its two best logits
    top5_ids_p, top5_logprobs_p [N, 5] the best tokens of each greedy step
    and for prompt 0: hidden_0 [L + 1, T, H] (after the embedding, after each layer but the last, after the final norm),
    router_ids_0, router_weights_0 [MoE layers, T, K]: the experts and what their outputs are multiplied by, so normalised
    where the model does that and with Gemma 4's scale of each expert; absent for a model without experts

Weights are random, with a scale at which each of them matters: a wrong one moves the logits by far more than rounding does. The
seed is the first one where no choice (of an expert, of a greedy token) and no order of the best tokens hangs on rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import tokenizers
import torch
import transformers
from golden_checkpoints import Margins, write_checkpoint, write_json
from golden_variants import VARIANTS
from transformers.quantizers.auto import AutoQuantizationConfig

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
NUM_GREEDY = 24

PROMPTS = (
    "The router looks",
    "A train leaves at 7:45 and needs 90 minutes. When does it arrive? Answer in one line.\n",
    'Translate: "Die Katze schläft." 花が咲く 🌈. Then write a function that adds 12 and 30:\ndef add(a, b):\n    return a + b\n'
    "Finally, describe the weather in Lisbon, where the sun has been out for three days.",
)


def load_model(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        quantization = AutoQuantizationConfig.from_dict(quantization | {"dequantize": True})
    model, report = getattr(transformers, config.architectures[0]).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        **({} if quantization is None else {"quantization_config": quantization}),
        output_loading_info=True,
    )
    assert not any(report.values()), report
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return model.eval()


class RouterTap:
    """Collects what the routers decide while it is open, in the order of the layers."""

    def __init__(self, model: torch.nn.Module):
        self.ids: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.gap = float("inf")
        """Smallest distance between the logits of the last expert taken and the first one left."""
        routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
        self.handles = [router.register_forward_hook(self.collect) for router in routers]

    def collect(self, module: Any, inputs: Any, outputs: Any) -> None:
        scores, weights, ids = outputs
        if type(module).__name__ == "Gemma4TextRouter":
            scores = scores.log()  # it gives probabilities, whose logarithms are as far apart as the logits
        ranked, num_taken = scores.sort(-1, descending=True).values, ids.shape[-1]
        self.gap = min(self.gap, float((ranked[:, num_taken - 1] - ranked[:, num_taken]).min()))
        self.ids.append(ids.numpy().astype(np.int32))
        self.weights.append(weights.numpy())

    def __enter__(self) -> RouterTap:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def forward(model: Any, ids: list[int], **options: Any) -> Any:
    return model(input_ids=torch.tensor([ids]), use_cache=False, **options)


def check_last_hidden(model: Any, hidden: torch.Tensor, logits: torch.Tensor) -> None:
    """The head makes the logits from this state, so it is the one after the final norm."""
    found = model.get_output_embeddings()(hidden)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is not None:
        found = cap * torch.tanh(found / cap)
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=0)


def golden_values(
    model: Any, prompts: list[list[int]], margins: Margins
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(arrays of golden.npz, smallest gaps over all prompt and greedy tokens).

    Stops as soon as a gap is below its margin; the arrays are then incomplete.
    """
    values: dict[str, np.ndarray] = {}
    with RouterTap(model) as tap:
        for prompt in prompts:
            forward(model, prompt)
    gaps = {"router": tap.gap, "argmax": float("inf"), "top5": float("inf")}
    if not tap.gap > margins.router:
        return values, gaps
    for number, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(NUM_GREEDY):
            ids.append(int(forward(model, ids).logits[0, -1].argmax()))
        with RouterTap(model) as tap:
            result = forward(model, ids, output_hidden_states=True)
        logits, length = result.logits[0], len(prompt)
        steps = logits[length - 1 : -1]
        best = steps.topk(2).values
        top5 = steps.log_softmax(-1).topk(5)
        values |= {
            f"prompt_{number}": np.array(prompt, np.int32),
            f"logits_{number}": logits[:length].numpy(),
            f"greedy_{number}": np.array(ids[length:], np.int32),
            f"greedy_gap_{number}": (best[:, 0] - best[:, 1]).numpy(),
            f"top5_ids_{number}": top5.indices.numpy().astype(np.int32),
            f"top5_logprobs_{number}": top5.values.numpy(),
        }
        assert np.array_equal(steps.argmax(-1).numpy(), ids[length:])
        found = {
            "router": tap.gap,
            "argmax": float((best[:, 0] - best[:, 1]).min()),
            "top5": float((top5.values[:, :-1] - top5.values[:, 1:]).min()),
        }
        gaps = {name: min(gap, found[name]) for name, gap in gaps.items()}
        if number == 0:
            check_last_hidden(model, result.hidden_states[-1][0], logits)
            values["hidden_0"] = torch.stack(result.hidden_states)[:, 0, :length].numpy()
            if tap.ids:
                values["router_ids_0"] = np.stack(tap.ids)[:, :length]
                values["router_weights_0"] = np.stack(tap.weights)[:, :length]
        if not all(gap > getattr(margins, name) for name, gap in gaps.items()):
            break
    return values, gaps


@torch.no_grad()
def make(name: str, seed: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """Writes one fixture.

    Returns:
      Its manifest, and whether the seed is clear: no choice or order hangs on rounding, and the continuations are varied
      text that ends at no special token. The golden values of a seed that is not are incomplete.
    """
    variant = VARIANTS[name]
    tokenizer = variant.train()
    write_checkpoint(folder, variant, seed, tokenizer)
    model = load_model(folder)
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder / "v5_style")
    prompts = [tokenizer.backend.encode(text).ids for text in PROMPTS]
    values, gaps = golden_values(model, prompts, variant.margins)
    np.savez_compressed(folder / "golden.npz", **values)  # type: ignore[arg-type]
    greedy = [token for number in range(len(prompts)) for token in values.get(f"greedy_{number}", np.empty(0)).tolist()]
    num_distinct, has_special = len(set(greedy)), not all(map(tokenizer.is_text, greedy))
    manifest = {
        "script": "scripts/make_goldens.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
        },
        "seed": seed,
        "router_gap": gaps["router"] if math.isfinite(gaps["router"]) else None,
        "argmax_gap": gaps["argmax"],
        "top5_gap": gaps["top5"],
        "distinct_greedy_tokens": num_distinct,
        "greedy_has_special": has_special,
        "tokenizer_size": tokenizer.size,
        "margins": dataclasses.asdict(variant.margins),
        "prompts": list(PROMPTS),
        "prompt_lengths": [len(prompt) for prompt in prompts],
    }
    write_json(folder / "manifest.json", manifest)
    clear = all(gap > getattr(variant.margins, name) for name, gap in gaps.items())
    return manifest, clear and num_distinct >= variant.margins.num_distinct and not has_special


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIXTURES, help="folder that gets one folder per variant")
    parser.add_argument("--only", choices=sorted(VARIANTS), help="one variant instead of all")
    parser.add_argument("--seed", type=int, help="this seed instead of the first clear one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for variant in [options.only] if options.only else VARIANTS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / variant
            for seed in [options.seed] if options.seed is not None else range(1000):
                manifest, clear = make(variant, seed, folder)
                print(
                    variant,
                    {key: value for key, value in manifest.items() if not isinstance(value, dict | list)},
                    flush=True,
                )
                if clear:
                    break
            else:
                raise SystemExit(f"{variant}: none of the seeds tried is clear")
            shutil.rmtree(options.out / variant, ignore_errors=True)
            shutil.copytree(folder, options.out / variant)


if __name__ == "__main__":
    main()
