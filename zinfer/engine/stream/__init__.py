"""The `stream` engine: weights in pinned host memory, one layer of them on the GPU, a link that never waits.

Decode reads every layer once a step and a layer's copy takes far longer than its compute, so the step time is the bytes
on the wire over the link bandwidth, provided that a copy is always under way. The ring runs ahead of compute across
layers and across steps: while the head turns the last layer's output into a token, the next step's first layer comes.
"""
