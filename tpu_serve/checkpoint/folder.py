"""From what the user calls a model to a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from tpu_serve.config import ConfigError

SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "merges.txt")
WEIGHT_FILES = ("*.safetensors",)
# Subfolders and consolidated files hold the same weights again, for other programs.
NEVER = ("*/*", "consolidated*")

_HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a model: a local folder as it is, without any network; otherwise the download of a hub id.

    Args:
      model: a folder, or a hub id such as `Qwen/Qwen3-30B-A3B`. An existing folder wins.
      revision: branch, tag or commit of a hub id.
      weights: False leaves the weights on the hub (dummy weights, or only the tokenizer is wanted).

    Raises:
      ConfigError: there is no such folder and no such repository, or it cannot be downloaded, and why.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"--revision {revision} is for hub ids, but {model} is a local folder.")
        return path
    if path.exists():
        raise ConfigError(f"{model} is a file; name the folder that holds config.json and the *.safetensors files.")
    if not _HUB_ID.fullmatch(model) or "--" in model or ".." in model or model.endswith(".git"):
        raise ConfigError(f"There is no folder {model!r}, and it is not a hub id either (like owner/name).")
    return _download(model, revision, weights)


def _download(model: str, revision: str | None, weights: bool) -> Path:
    # Here and not above: a local folder has no use for the hub's client, which takes a while to import.
    import huggingface_hub

    patterns = [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=patterns, ignore_patterns=list(NEVER)
            )
        )
    except Exception as error:  # its kinds differ between releases of the client and of its HTTP library
        raise ConfigError(_explain(model, revision, error)) from None


def _explain(model: str, revision: str | None, error: Exception) -> str:
    """One sentence for the user about a failed download, and what to do."""
    from huggingface_hub import errors

    login = "log in with `hf auth login` or set HF_TOKEN"
    match error:
        case errors.GatedRepoError():
            return f"{model} is gated: accept its terms at https://huggingface.co/{model}, then {login}."
        case errors.RepositoryNotFoundError():
            return f"There is no folder {model!r} here and no such repository on the hub. If it is private, {login}."
        case errors.RevisionNotFoundError():
            return f"{model} has no revision {revision!r} on the hub."
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() | ConnectionError() | TimeoutError():
            return (
                f"There is no folder {model!r} here, and the hub cannot be reached to download it (no network, or "
                f"HF_HUB_OFFLINE is set). Copy the model's folder to this machine and give its path. [{_brief(error)}]"
            )
        case errors.HfHubHTTPError():
            return f"The hub refused {model!r}: {_brief(error)}."
        case _:
            return f"{model!r} cannot be downloaded: {_brief(error)}."


def _brief(error: Exception) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
