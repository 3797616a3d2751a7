"""Hugging Face hub: configurations, and weights only on request.

Nothing that a repository holds is ever run: no pickled weights, no remote code. The hub library's own cache and
switches (HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN) apply.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zinfer.checkpoint import configuration
from zinfer.checkpoint.headers import weight_files, weight_source_files
from zinfer.core.errors import environment_error
from zinfer.core.model import ModelError
from zinfer.system.documents import DocumentError, read_bytes

# owner/name, and the branch, tag or commit to take
REFERENCE = r"[\w.-]+/[\w.-]+(@[\w./-]+)?"
_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
_NOT = ["*/*", "consolidated*"]  # folders and Mistral's second copy of the weights would double the download
TIMEOUT_S = 10.0
_WITHOUT = "use --load-format dummy with a catalogue model, or pass a local folder"
# Errors of huggingface_hub: the hub was reached, and has no such thing; or there is no way to it.
_ABSENT = {
    "RevisionNotFoundError": "the hub has no such revision",
    "RepositoryNotFoundError": "the hub has no such model, or it is private: check it, or `hf auth login`",
    "EntryNotFoundError": "the repository has no config.json: it holds no transformers model",
    "HFValidationError": "its name is no name of the hub",
}
_OUT_OF_REACH = {
    "GatedRepoError": "its access is restricted: accept its terms on the hub, then `hf auth login`",
    "OfflineModeIsEnabled": f"HF_HUB_OFFLINE is set and no complete copy is in the local cache; {_WITHOUT}",
    "LocalEntryNotFoundError": f"it is not in the local cache and the hub cannot be reached; {_WITHOUT}",
}


def split(reference: str) -> tuple[str, str | None]:
    """Return hub id and revision of ``owner/name@revision``; None is the default branch."""
    hub_id, _, revision = reference.partition("@")
    return hub_id, revision or None


@contextmanager
def _explained(hub_id: str) -> Iterator[None]:
    """Turn any failure of the hub into a one-line ModelError."""
    try:
        yield
    except ModelError:
        raise
    except ImportError:
        message = f"{hub_id}: models of the hub need huggingface_hub: pip install 'zinfer[engines]'"
        raise environment_error(ModelError(message)) from None
    except Exception as error:  # also network failures (each HTTP client has its own), 5xx, disk
        kinds = [kind.__name__ for kind in type(error).__mro__]
        fault = f"the hub cannot be used ({' '.join(str(error).split())[:200]}); {_WITHOUT}"
        kind = next((kind for kind in kinds if kind in _ABSENT | _OUT_OF_REACH), "")
        told = ModelError(f"{hub_id}: {(_ABSENT | _OUT_OF_REACH).get(kind, fault)}")
        raise (told if kind in _ABSENT else environment_error(told)) from None


def config_of(reference: str) -> dict[str, Any]:
    """Return the config.json of ``owner/name`` or ``owner/name@revision``. Raises ModelError."""
    hub_id, revision = split(reference)
    with _explained(hub_id):
        from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

        path = try_to_load_from_cache(hub_id, "config.json", revision=revision)
        if not isinstance(path, str):
            # Fails fast: without a network the download itself retries for half a minute.
            HfApi().model_info(hub_id, revision=revision, timeout=TIMEOUT_S)
            path = hf_hub_download(hub_id, "config.json", revision=revision)
    try:
        return configuration.parse(read_bytes(Path(path), configuration.MAX_BYTES), f"config.json of {hub_id}")
    except (DocumentError, FileNotFoundError) as error:
        raise ModelError(f"{hub_id}: its config.json cannot be read: {error}") from None


def download(reference: str) -> Path:
    """Return the folder of a complete snapshot; what is missing is downloaded. Raises ModelError."""
    if (folder := cached(reference)) is not None:
        return folder
    hub_id, revision = split(reference)
    with _explained(hub_id):
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi().model_info(hub_id, revision=revision, timeout=TIMEOUT_S)
        files = [file.rfilename for file in info.siblings or []]
        if not any(name.endswith(".safetensors") for name in files):
            raise ModelError(f"{hub_id}: it has no safetensors, and pickled weights are not read; {_WITHOUT}")
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_FILES, ignore_patterns=_NOT))


def cached(reference: str) -> Path | None:
    """Return the folder of a complete local snapshot, if any. The network is not used."""
    hub_id, revision = split(reference)
    try:
        from huggingface_hub import snapshot_download

        only = {"local_files_only": True, "allow_patterns": _FILES, "ignore_patterns": _NOT}
        folder = Path(snapshot_download(hub_id, revision=revision, **only))
        named = configuration.read(folder / "config.json").get("transformers_weights")
        sources = weight_source_files(folder, named)
        complete = bool(sources) and all(file.exists() for file in weight_files(sources[0]))
    except (ImportError, OSError, ValueError):
        return None
    return folder if complete else None
