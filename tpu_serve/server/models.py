"""Cards of the served names."""

from __future__ import annotations

from typing import Any

from tpu_serve.parsing.registry import name_of
from tpu_serve.server.replies import ModelCard, ModelList, whole
from tpu_serve.server.state import ServerState


def model_card(state: ServerState, name: str) -> dict[str, Any]:
    """One card. It is there while the model loads, then without its length."""
    return whole(_card(state, name))


def model_list(state: ServerState) -> dict[str, Any]:
    return whole(ModelList(data=[_card(state, name) for name in state.names]))


def _card(state: ServerState, name: str) -> ModelCard:
    formats = None if state.service is None else state.service.formats
    return ModelCard(
        id=name,
        created=state.created,
        root=state.root,
        max_model_len=None if state.service is None else state.service.info.max_model_len,
        reasoning_parser=None if formats is None else name_of(formats.reasoning),
        tool_call_parser=None if formats is None else name_of(formats.calls),
        permission=[
            {
                "id": f"modelperm-{state.created}",
                "object": "model_permission",
                "created": state.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    )
