"""Numbers of a block of coded weights, for codec and kernels."""

BLOCK = 16384  # values in a block; small enough for the tables to follow rows of differing scale
LEVELS = 4  # the fourth saves 0.2% of the size, a fifth would save 0.04%
ROW = 16  # codes in a row of 32 bits
# The GPU unpacks levels 2.. into the block's own place in `out`, before the values, which needs some free space there.
# A block with more escapes than this is noise.
MAX_ESCAPES = BLOCK - 4 * ROW
