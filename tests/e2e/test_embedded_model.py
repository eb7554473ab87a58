"""The embedded model answers as its card says, and what trained it still trains: its objective has a gradient for every weight."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.config import EMBEDDED_MODEL
from tpu_serve.device.mesh import make_mesh
from tpu_serve.device.params import random_init
from tpu_serve.hf_config import read_config
from tpu_serve.models.qwen3_moe import Qwen3Moe

SCRIPTS = Path(__file__).parents[2] / "scripts" / "embedded_model"


@pytest.fixture
def scripts(monkeypatch):
    """The scripts' modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for path in SCRIPTS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_the_card_says_how_it_answers(scripts, capsys):
    from score import GOALS, score, served

    with served("") as url:
        found = score(url, show=True)
    rows = re.findall(
        r"^\| .+ \| (\d+) of (\d+) \| (\d+) % \|$", (EMBEDDED_MODEL / "README.md").read_text(), re.MULTILINE
    )
    assert [(int(right), int(total)) for right, total, _ in rows] == list(found.values()), capsys.readouterr().out
    assert [int(goal) / 100 for *_, goal in rows] == list(GOALS.values())
    assert all(right >= GOALS[kind] * total for kind, (right, total) in found.items())


def test_wrong_answers_are_wrong(scripts):
    from questions import questions
    from score import judge

    for question in questions():
        assert not any(judge(question, {"content": "That is so.", "tool_calls": None}).values())


def test_training_text_and_questions_are_apart(scripts):
    import random

    from text import conversation
    from words import UNKNOWN_TOPICS

    drawn = random.Random(1)
    said = [
        message["content"] for _ in range(3000) for message in conversation(drawn).messages if message["role"] == "user"
    ]
    for topic in UNKNOWN_TOPICS:
        assert not [text for text in said if re.search(rf"\b{topic}\b", text)], topic


def test_the_objective_has_a_gradient_for_every_weight(scripts):
    from objective import loss
    from rows import Rows

    model = Qwen3Moe.from_config(read_config(EMBEDDED_MODEL, {}))
    params = random_init(model.param_specs(jnp.float32), make_mesh(jax.devices()[:1]), {}, 1)
    tokens, weights = (jnp.asarray(part[:2]) for part in Rows(EMBEDDED_MODEL).take(3))

    @jax.jit
    def descend(params):
        (value, _), gradients = jax.value_and_grad(lambda p: loss(model, p, tokens, weights), has_aux=True)(params)
        return value, gradients, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)

    first, gradients, params = descend(params)
    assert all(np.isfinite(one).all() and np.any(one) for one in jax.tree.leaves(gradients))
    for _ in range(3):
        last, _, params = descend(params)
    assert float(last) < float(first)
