"""The reference: what `transformers.generate` adds to each prompt alone, with the logits that it chose by."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from tools.conformance.sizes import FIRST_TOKEN, VOCAB_SIZE

# Tokens in the prompts, and added. One prompt is longer than the blocks of 64 tokens that some models have in their
# code; one is shorter, and the others are longer, than all windows, chunks and budgets of `tools.conformance.sizes`.
LENGTHS, OUTPUT_LEN = (70, 3, 21, 18), 12
SEEDS = 8  # sets of prompts that are tried
ROUNDING = 2.0**-20  # relative noise of weights: that of eight roundings
SENSITIVE = 3e-2  # logits of a usable prompt change less with it, as a share of their spread
# Wrappers of Cohere's models: transformers leaves out the scale of logits that its text models, and zinfer, have.
UNSCALED = frozenset({"aya_vision", "cohere2_vision"})
TOLERANCE = 1e-3  # largest difference of logits, as such a share, unless that noise gives more


class Reference(NamedTuple):
    """Prompts, their next tokens ``[B, OUTPUT_LEN]``, and logits ``[B, OUTPUT_LEN, V]``.

    Logits may differ from these by `tolerance` of their spread. `skipped` counts the sets of prompts before this one,
    whose logits change with roundings, or whose rows all get the same tokens.
    """

    prompts: list[list[int]]
    tokens: Tensor
    logits: Tensor
    tolerance: float = TOLERANCE
    skipped: int = 0

    def error(self, row: int, step: int, logits: Tensor) -> float:
        """Return the relative distance of `logits`, ``[V]``, from the reference's."""
        return difference(logits, self.logits[row, step])


class CannotCompare(ValueError):
    """Raised for a model whose own `generate` is no reference."""


class Monotonous(CannotCompare):
    """Raised for a model that hardly depends on its prompt; other weights may help."""


class _Forced(LogitsProcessor):  # type: ignore[misc]
    """Choice of given `tokens` behind a prompt of `length`."""

    def __init__(self, length: int, tokens: Tensor) -> None:
        self._length, self._tokens = length, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self._tokens[input_ids.shape[1] - self._length]] = 0
        return chosen


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits over their spread; infinite if one alone is no number."""
    actual, expected = actual.detach().float().cpu(), expected.float()
    numbers = expected.isfinite()
    if actual.shape != expected.shape or not torch.equal(actual.isfinite(), numbers):
        return torch.inf
    return float((actual - expected)[numbers].abs().max() / expected[numbers].std())


def prompts(seed: int) -> list[list[int]]:
    """Return random prompts of `LENGTHS`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(FIRST_TOKEN, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def reference(model_class: type[PreTrainedModel], directory: Path) -> Reference:
    """Return the first prompts whose logits hardly depend on rounding.

    So a prompt is left out only for what transformers does with it alone, and never for what zinfer does. Raises
    CannotCompare if transformers gives no usable reference.
    """
    model, other = (_loaded(model_class, directory) for _ in range(2))
    _round_otherwise(other)
    why: CannotCompare = CannotCompare("transformers gives every prompt other logits with weights rounded otherwise")
    for seed in range(SEEDS):
        try:
            tokens, logits = _alone(model, prompts(seed))
        except Monotonous as error:
            why = error
            continue
        noise = difference(_alone(other, prompts(seed), tokens)[1], logits)
        if noise < SENSITIVE:
            return Reference(prompts(seed), tokens, logits, max(TOLERANCE, noise), seed)
    raise why


def _loaded(model_class: type[PreTrainedModel], directory: Path) -> PreTrainedModel:
    model, info = model_class.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise CannotCompare(f"transformers does not load {sorted(info['missing_keys'])[0]}, which it has saved itself")
    if model.config.model_type in UNSCALED:
        scale = model.config.get_text_config(decoder=True).logit_scale
        model.get_output_embeddings().register_forward_hook(lambda _module, _args, logits: scale * logits)
    model.eval().generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=OUTPUT_LEN, min_new_tokens=OUTPUT_LEN, pad_token_id=0, use_cache=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return model


def _alone(model: PreTrainedModel, rows: list[list[int]], forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each prompt's tokens and logits by `generate`. They follow `forced` ``[B, OUTPUT_LEN]``, if given."""
    tokens, logits = [], []
    for number, row in enumerate(rows):
        ids, mask = torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64)
        choice = LogitsProcessorList([] if forced is None else [_Forced(len(row), forced[number])])
        output = model.generate(input_ids=ids, attention_mask=mask, logits_processor=choice)
        tokens.append(output.sequences[0, len(row) :])
        logits.append(torch.cat(output.logits).float())
    generated, scores = torch.stack(tokens), torch.stack(logits)
    if not bool(torch.isfinite(scores.max(-1).values).all()) or bool(scores.isnan().any()):
        raise CannotCompare("transformers generates NaN")
    if generated.shape[1] != OUTPUT_LEN or (forced is None and not torch.equal(generated, scores.argmax(-1))):
        raise Monotonous("transformers generates other tokens than the largest logits are of")
    if len({tuple(row.tolist()) for row in generated}) < len(generated) or len(generated.unique()) < 6:
        raise Monotonous("transformers generates the same tokens whatever the prompt")
    return generated, scores


@torch.no_grad()
def _round_otherwise(model: PreTrainedModel) -> None:
    """Change the weights of `model` as other roundings would."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.mul_(1 + ROUNDING * torch.randn(parameter.shape, generator=generator))
