"""A real model with its real tokenizer and chat template, served as a mixture of experts, says what the dense model says.

Greedy tokens are compared with `smollm2.Oracle`, which shares no code with us: fed with an answer, it must have chosen each token of
it, and given it the probability that we report. Then its own greedy answer is the same one.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import smollm2

from tpu_serve import LLM, SamplingParams
from tpu_serve.llm import RequestOutput

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parents[2] / "scripts" / "upcycle_smollm2.py"
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And a fruit that has 7 letters, naïve café 🙂?"},
    ],
    [{"role": "user", "content": "Write a Python function that adds two numbers, 12 and 345."}],
]
FIRST_IDS = (
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
)
"""The first conversation behind the system message that the template adds."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
# One program, below the prompts' lengths: they are prefilled in pieces while others decode.
OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "num_pages": 80}
OPTIONS |= {"max_num_batched_tokens": 32, "token_buckets": (32,)}
TOLERANCE = 5e-4
"""On log-probabilities. Measured: 2e-5."""


@pytest.fixture(scope="module")
def wheel() -> Path:
    pytest.importorskip("gguf", reason="SmolLM2 IS NOT TESTED: the gguf package is missing (pip install -e '.[test]')")
    return smollm2.wheel()


@pytest.fixture(scope="module")
def oracle(wheel: Path) -> smollm2.Oracle:
    return smollm2.Oracle(wheel)


@pytest.fixture
def convert(wheel: Path) -> Iterator[Callable[..., str]]:
    """Runs the converter with options and returns the folder, which is gone after the test."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*options: str) -> str:
            out = f"{folder}/model"
            subprocess.run([sys.executable, SCRIPT, wheel, out, *options], check=True)
            return out

        yield run


def check(oracle: smollm2.Oracle, output: RequestOutput, num_layers: int) -> None:
    (choice,) = output.outputs
    ids = [*output.prompt_token_ids, *choice.token_ids]
    logits = oracle.logits(ids[:-1], num_layers)[len(output.prompt_token_ids) - 1 :]
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    assert choice.token_ids == tuple(logits.argmax(-1).tolist())
    assert choice.text == oracle.text(choice.token_ids)
    for expected, reported in zip(logprobs, choice.logprobs or (), strict=True):
        tokens, values = zip(*reported.top, strict=True)
        np.testing.assert_allclose(values, expected[list(tokens)], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(values, np.sort(expected)[:-3:-1], rtol=0, atol=TOLERANCE)


def test_slices_say_what_the_dense_model_says(oracle: smollm2.Oracle, convert: Callable[..., str]) -> None:
    """The whole model, every layer's feed-forward part cut into eight experts."""
    llm = LLM(convert("--as", "mixtral", "--split", "8"), **OPTIONS)
    outputs = llm.chat(CONVERSATIONS, GREEDY)
    assert outputs[0].prompt_token_ids == FIRST_IDS
    for output in outputs:
        assert output.prompt == oracle.text(output.prompt_token_ids, special=True)
        check(oracle, output, num_layers=30)
    assert outputs[0].outputs[0].text == "The capital of France is Paris."
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop", "length"]


def test_copies_say_what_the_dense_model_says(oracle: smollm2.Oracle, convert: Callable[..., str]) -> None:
    """Four layers, whose experts are copies that a random router chooses from. The text is noise, the tokens are not."""
    llm = LLM(convert("--as", "mixtral", "--experts", "4", "--top-k", "2", "--layers", "4"), **OPTIONS)
    for output in llm.chat(CONVERSATIONS, GREEDY):
        check(oracle, output, num_layers=4)
