"""Sources of weights: a local checkpoint, the hub, or a random generator.

Speed does not depend on the values of the weights, so a sweep uses real ones only if they are on this machine; text
generated without them is pointless, so `zinfer run` downloads them.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zinfer.checkpoint import gguf, hub
from zinfer.checkpoint.headers import Checkpoint
from zinfer.checkpoint.resolve import resolve
from zinfer.core.case import LoadFormat
from zinfer.core.model import Dtype, ModelError, ModelSpec, Weights

LoadFormatOption = Literal["auto", "safetensors", "dummy"]


@dataclass(frozen=True)
class Source:
    """A model, the format of its weights, and a fingerprint of both."""

    spec: ModelSpec
    load_format: LoadFormat
    revision: str


def find(
    reference: str,
    dtype: Dtype | None,
    layers: int | None,
    load_format: LoadFormatOption,
    fetch: bool = False,
    weights: Weights = "as-released",
    draft: str | None = None,
) -> Source:
    """Find the model of `reference` and its weights, in the format `weights`. Raises ModelError or CheckpointError.

    With ``auto`` they are real if they are on this machine, and dummy otherwise, unless `fetch` allows a download.
    `draft` is the reference of a model that drafts for it, whose weights are of the same kind.
    """
    spec = resolve(reference, dtype, layers, weights)
    if load_format != "dummy" and spec.directory is None and spec.hub_id is not None:
        directory = hub.cached(spec.hub_id)
        if directory is None and (fetch or load_format == "safetensors"):
            directory = hub.download(spec.hub_id)
        spec = spec.model_copy(update={"directory": None if directory is None else str(directory)})
    if load_format == "safetensors" and spec.directory is None:
        raise ModelError(f"{reference} is a configuration without weights: --load-format dummy takes random ones")
    kind: LoadFormat = "dummy" if load_format == "dummy" or spec.directory is None else "safetensors"
    if kind == "dummy" and spec.directory is not None and spec.directory.endswith(gguf.SUFFIX):
        raise ModelError(f"{reference} is a GGUF, which is loaded as it is: leave out --load-format dummy")
    revision = revision_of(spec, kind)
    if kind == "dummy":
        spec = spec.model_copy(update={"directory": None})
    if draft is not None:
        spec = spec.model_copy(update={"draft": find(draft, spec.dtype, None, kind, fetch=True).spec})
    return Source(spec, kind, revision)


def revision_of(spec: ModelSpec, load_format: LoadFormat) -> str:
    """Return the fingerprint that tells two models of one name apart; dummy weights have their config's."""
    if load_format == "dummy":
        return "dummy-" + hashlib.sha256(json.dumps(spec.config, sort_keys=True).encode()).hexdigest()[:10]
    if not spec.directory:
        return ""
    made = "" if spec.weights == "as-released" else f"-{spec.weights}"
    return Checkpoint.open(Path(spec.directory)).revision + made
