"""Finding a model's folder, with every way the hub can refuse."""

from fnmatch import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from tpu_serve.checkpoint.folder import resolve
from tpu_serve.config import ConfigError


@pytest.fixture
def hub(monkeypatch):
    """A hub that records what it is asked; `hub.error` makes it fail. Nothing reaches the network."""
    state = SimpleNamespace(calls=[], error=None)

    def snapshot_download(repo_id, **options):
        state.calls.append((repo_id, options))
        if state.error is not None:
            raise state.error
        return "/cache/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def http_error(kind, text="403 Client Error. (Request ID: 1)\n\nmore lines"):
    return kind(text, response=SimpleNamespace(headers={}, request=None))


def test_local_folder_is_used_without_network(hub, tmp_path):
    assert resolve(str(tmp_path), None) == tmp_path
    assert hub.calls == []


def test_home_is_expanded(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model", None) == tmp_path / "model"


def test_revision_of_a_local_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--revision main is for hub ids"):
        resolve(str(tmp_path), "main")


def test_file_is_refused(hub, tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        resolve(str(tmp_path / "model.safetensors"), None)
    assert hub.calls == []


@pytest.mark.parametrize("model", ["/no/such/folder", "./model", "a/b/c", "two words", "owner--name", "a/..b", "x.git"])
def test_what_cannot_be_a_hub_id_never_reaches_the_hub(hub, model):
    with pytest.raises(ConfigError, match=r"There is no folder .* not a hub id either"):
        resolve(model, None)
    assert hub.calls == []


def wanted(options, name):
    return any(fnmatch(name, pattern) for pattern in options["allow_patterns"]) and not any(
        fnmatch(name, pattern) for pattern in options["ignore_patterns"]
    )


@pytest.mark.parametrize("weights", [True, False])
def test_download_takes_what_is_read(hub, weights):
    assert str(resolve("owner/model", "v2", weights=weights)) == "/cache/snapshot"
    ((repo_id, options),) = hub.calls
    assert (repo_id, options["revision"]) == ("owner/model", "v2")
    small = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja")
    assert all(wanted(options, name) for name in small)
    assert wanted(options, "model-00001-of-00002.safetensors") is weights
    others = ("original/model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "model.gguf", "README.md")
    assert not any(wanted(options, name) for name in others)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            http_error(errors.GatedRepoError),
            "is gated: accept its terms at https://huggingface.co/owner/model.*HF_TOKEN",
        ),
        (http_error(errors.RepositoryNotFoundError), "no folder 'owner/model' here and no such repository.*private"),
        (http_error(errors.RevisionNotFoundError), "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError("Cannot find\nit"), "cannot be reached.*give its path.*Cannot find]"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be reached.*HF_HUB_OFFLINE"),
        (ConnectionError("refused"), "cannot be reached"),
        (http_error(errors.DisabledRepoError), "refused 'owner/model': DisabledRepoError: 403 Client Error"),
        (OSError(28, "No space left on device"), "cannot be downloaded: .*No space left"),
        (RuntimeError(), "cannot be downloaded: RuntimeError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_refusal_becomes_one_sentence(hub, error, words):
    hub.error = error
    with pytest.raises(ConfigError, match=words) as caught:
        resolve("owner/model", "v9")
    assert "\n" not in str(caught.value)
    hidden = caught.value.__suppress_context__ and caught.value.__cause__ is None
    assert hidden, "the hub library's traceback would be shown"
