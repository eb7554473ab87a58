"""Names and shapes of the parts that the published layouts share, for the golden_*.py files."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def outer(config: Config, prefix: str = "model") -> Shapes:
    """The embedding, the last norm and, unless it is tied, the head. `config` says whether it is; absent means tied."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {f"{prefix}.embed_tokens.weight": (vocab, hidden), f"{prefix}.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def norms(prefix: str, size: int, *names: str) -> Shapes:
    return {f"{prefix}.{name}.weight": (size,) for name in names}


def attention(
    prefix: str, hidden: int, num_heads: int, num_kv_heads: int, head: int, *, gated: bool = False, bias: str = ""
) -> Shapes:
    """The four projections.

    Args:
      gated: q_proj also gives an output gate, as many rows again.
      bias: which of "qkvo" have a bias.
    """
    rows = {"q": num_heads * head * (2 if gated else 1), "k": num_kv_heads * head, "v": num_kv_heads * head}
    shapes: Shapes = {f"{prefix}.{name}_proj.weight": (num, hidden) for name, num in rows.items()}
    shapes[f"{prefix}.o_proj.weight"] = (hidden, num_heads * head)
    for name in bias:
        shapes[f"{prefix}.{name}_proj.bias"] = (shapes[f"{prefix}.{name}_proj.weight"][0],)
    return shapes


def mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def experts(prefix: str, num_experts: int, hidden: int, inner: int) -> Shapes:
    """One MLP after another, each tensor on its own."""
    shapes: Shapes = {}
    for expert in range(num_experts):
        shapes |= mlp(f"{prefix}.{expert}", hidden, inner)
    return shapes


def fused_experts(prefix: str, num_experts: int, hidden: int, inner: int) -> Shapes:
    """All experts in two tensors: the rows of every gate before those of its up projection."""
    return {
        f"{prefix}.gate_up_proj": (num_experts, 2 * inner, hidden),
        f"{prefix}.down_proj": (num_experts, hidden, inner),
    }


def shared_expert(prefix: str, hidden: int, inner: int) -> Shapes:
    return mlp(f"{prefix}.shared_expert", hidden, inner) | {f"{prefix}.shared_expert_gate.weight": (1, hidden)}
