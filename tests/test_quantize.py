"""Own quantisation: codes and scales equal those of compressed-tensors, and are read as any released checkpoint."""

import pytest
import torch
from torch import Tensor

from zinfer.engine import quantize as own
from zinfer.engine.quantize import SCHEMES, Scheme, quantize

STRATEGIES = {"int4": "group", "int8": "channel", "fp8": "channel"}
FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


def library(weight: Tensor, scheme: Scheme, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return what compressed-tensors stores of a weight, and the weight that it makes of that."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    given = QuantizationArgs(
        num_bits=4 if scheme == "int4" else 8, type="float" if scheme == "fp8" else "int", symmetric=True,
        strategy=STRATEGIES[scheme], group_size=size if scheme == "int4" else None,
    )  # fmt: skip
    whole = QuantizationScheme(targets=["Linear"], weights=given)
    groups = weight.to(torch.float32).unflatten(-1, (-1, size))
    scales = calculate_qparams(groups.amin(-1), groups.amax(-1), given)[0].to(weight.dtype)
    compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme])
    # In float32, where the division is exact enough; the scales are those that are stored.
    made = compressor.compress(
        {"weight": weight.to(torch.float32), "weight_scale": scales.to(torch.float32)}, whole
    ) | {"weight_scale": scales}  # fmt: skip
    return made, compressor.decompress(dict(made), whole)["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("scheme", "columns"), [("int4", 256), ("int4", 192), ("int4", 48), ("int8", 100), ("fp8", 100)]
)
def test_parts_are_those_of_compressed_tensors(
    scheme: Scheme, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr(own, "VALUES_AT_ONCE", 5 * columns)  # the last rows are fewer
    weight = torch.randn(33, columns, generator=torch.Generator().manual_seed(1)).mul_(0.02).to(dtype)
    weight[3, :columns] = 0
    weight[4, 0], weight[5, 1] = 0.5, -0.5  # outliers
    expected, values = library(weight, scheme, own.group_size(columns, scheme))
    found = quantize(weight, scheme)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if name == "weight_scale":  # the library's scale of zeros is another type's smallest step
            tensor, expected[name] = (torch.cat([one[:3], one[4:]]) for one in (tensor, expected[name]))
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.view(torch.uint8).equal(expected[name].view(torch.uint8)), name
    half_step = {"int4": 0.5 / 7.5, "int8": 0.5 / 127.5, "fp8": 1 / 16}[scheme]  # over the largest magnitude
    largest, rounded = weight.float().abs().amax(1), torch.finfo(dtype).eps  # scales and values are rounded to the type
    assert bool(((values.float() - weight.float()).abs().amax(1) <= (half_step + rounded) * largest + 1e-6).all())


def test_a_row_that_no_group_divides_stays_in_16_bits() -> None:
    weight = torch.randn(4, 100, dtype=torch.bfloat16)
    assert quantize(weight, "int4")["weight"] is weight
    assert [own.group_size(size, "int4") for size in (4096, 320, 96, 48, 100, 0)] == [128, 64, 32, 16, 0, 0]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(scheme: Scheme, damage: float) -> None:
    weight = torch.ones(4, 32)
    weight[2, 5] = damage
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight, scheme)


def test_other_schemes_and_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="there are int4, int8, fp8"):
        quantize(torch.ones(2, 16), "int3")  # type: ignore[arg-type]
    for weight in (torch.ones(16), torch.ones(2, 2, 16), torch.ones(2, 16, dtype=torch.int32)):
        with pytest.raises(ValueError, match="no matrix"):
            quantize(weight, "int8")
