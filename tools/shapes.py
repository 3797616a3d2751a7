"""Writer of zinfer/catalog/shapes.json: the counts of the catalogue's models, taken from the models themselves."""

import json
import sys
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from zinfer.checkpoint import resolve
from zinfer.checkpoint.architecture import measure
from zinfer.core.model import LayerSpec, Shape

FILE = Path(str(files("zinfer"))) / "catalog" / "shapes.json"


def measured(name: str) -> Shape:
    """Return the shape of a catalogue entry, measured on transformers' model."""
    entry = resolve._catalogue()[name]
    return measure(name, entry["config"] | dict.fromkeys(entry.get("nulls", ())))


def packed(shape: Shape) -> dict[str, Any]:
    """Return a shape as the catalogue stores it: each kind of layer once, and the order of the kinds."""
    kinds = list[LayerSpec](dict.fromkeys(shape.layers))
    order = [[kind, len(list(same))] for kind, same in groupby(kinds.index(layer) for layer in shape.layers)]
    fields = shape.model_dump(exclude={"layers", "num_layers"}, exclude_defaults=True)
    return fields | {"kinds": [kind.model_dump(exclude_defaults=True) for kind in kinds], "order": order}


def main() -> None:
    counts = {}
    for name in resolve.catalogue_names():
        print(f"counting {name}", file=sys.stderr)
        counts[name] = packed(measured(name))
    lines = (f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in counts.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
