"""Numbers that tune the schedule and the scheduler of continuous batching."""

from dataclasses import dataclass

from zinfer.plan.times import Efficiency

# A bit less than is recorded
AT_FIRST = Efficiency(link_share=0.98, mfu=0.7, expert_mfu=0.55)


@dataclass(frozen=True)
class Tuning:
    """Tuned numbers; those without a source are choices that tests/test_schedule.py holds to its bounds."""

    # Which rows run
    max_rows: int = 4096  # rows that run at a time: beyond, planning a pass takes longer than launching it
    min_margin_share: float = 0.5  # fewer of the rows that fit without a margin, and memory is not kept free for one
    growth: int = 64  # positions by which a micro-batch grows
    padding: float = 1.1  # positions taken over positions needed: what admission expects of growth and padding
    expanded_share: float = 0.03  # of the device's memory, for keys and values that attention copies for its heads
    working_share: float = 0.08  # of a GPU's memory, which the KV cache leaves to the work of a pass
    request_share: int = 4  # a request keeps at most this fraction (1 / n) of rows while others wait
    patience: int = 4  # passes after which prompts of a request without a row have a pass of their own

    # Prompts of a pass
    at_first: Efficiency = AT_FIRST
    min_prompt_tokens: int = 256  # fewer make poor matrix products
    front: int = 64  # waiting rows among which one of like length is looked for
    new_batches: int = 3  # micro-batches that one pass begins at most
    alike: float = 0.8  # shortest prompt of a micro-batch over its longest
    reuse_slack: int = 64  # tokens by which rows that reuse kept prefixes may differ besides
    scored_logits: int = 1 << 27  # logits of a micro-batch that a pass keeps for scores: 512 MB of float32

    # Padding, as a share of positions
    waste: float = 0.08  # of a micro-batch before it is compacted
    host_waste: float = 0.25  # of one in host memory, which is slow to move
    draft_waste: float = 0.2  # with drafts, each pass of which leaves gaps
    merged_waste: float = 0.04  # of all, after a merge
    draft_gaps: int = 2  # passes of drafts that are all wrong, for which a micro-batch has room
    draft_slack: float = 0.5  # room for forgotten drafts where it cannot be made later, over the tokens to come

    # Number of micro-batches
    few_batches: int = 4  # merged above this number if that is cheap
    many_batches: int = 20  # merged above this number anyway
    batches_share: float = 0.6  # of the link's seconds, in which the micro-batches of a pass may read the weights

    # Seconds of a pass: first guesses, which measured passes correct
    launch_s: float = 0.8e-3  # in which the CPU launches a layer
    pass_s: float = 4e-3  # in which it launches what a forward pass needs besides its layers
    joined_s: float = 0.12e-3  # in which it launches the attention of one more micro-batch of a joined pass
    warm_up: int = 8  # passes that are not measured: they compile kernels and take memory
    hidden: float = 1.3  # seconds of a pass over the link's up to which its work may be shorter: some never hides
    recent: int = 5  # passes whose median corrects the seconds: single slow ones say nothing

    # Shortage of memory
    lower: tuple[int, int] = 4, 5  # share of a load that was too large, which the limits allow from then on
    higher: tuple[int, int] = 9, 8  # by which lowered limits rise in a step
    calm: int = 256  # passes with enough memory before they rise

    # Kept prefixes
    min_kept: int = 16  # tokens of a prefix that is worth keeping and reusing
    kept_chunk: int = 512  # tokens whose keys and values are kept, and dropped, together at most
    kept_spare: float = 0.02  # of the host's memory, which kept KV caches leave free
    max_snapshots: int = 8192  # in memory, each of which is a mapping: a process may have some 65,000

    # Queue
    singly: int = 16  # part (1 / n) of a sorted list below which entries are put in one by one, and not by sorting

    # Text
    settled: int = 16  # tokens after which the text before them is not decoded again


TUNED = Tuning()


@dataclass(frozen=True)
class DraftTuning:
    """Tuned numbers of drafts."""

    longest: int = 4  # tokens of the suffix that is looked for first
    shortest: int = 2  # and last
    first_chance: float = 0.5  # of the first draft of all to be right
    first_drafts: int = 4  # of a row until the time of a pass with drafts is known
    min_first_chance: float = 0.35  # of a new row's draft, where drafting takes no time
    memory: float = 0.9  # weight of earlier verifications, at each further one
    longest_pause: int = 64  # passes; a pause is twice as long as the one before
    recent: int = 9  # passes whose median gives the seconds of one
    margin: float = 0.03  # gain from which on drafts pay that take time: chances are known roughly
    trying: float = 0.005  # share of the time in which they are tried where they do not pay
    first_plain: int = 3  # passes with drafts before one without is measured at first
    plain: int = 64  # and then
    worth: float = 0.03  # tokens gained for each row by a further draft: a pass computes one in every row of it

    # A model that drafts
    backlog: int = 64  # tokens of a row that are computed along with others; a row that lacks more is computed anew
    growth: int = 128  # positions by which its KV cache grows, and that it has at least behind the longest row
    ended: float = 0.5  # share of the rows that may have ended before the others get a micro-batch of their own
    recent_rounds: int = 5  # rounds of drafts whose median gives the seconds of a token


DRAFTS = DraftTuning()
