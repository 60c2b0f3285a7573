"""Triton kernels for CUDA. With TRITON_INTERPRET=1 Triton's interpreter runs them on the CPU.

A program of `attend` takes one split of a segment's slots and all queries of a kv head, a tile of
slots at a time, with an online softmax; `merge` joins the splits of all segments by their
log-sum-exp. Spare rows of a tensor core's product apply the scales of codes: queries are repeated
once per group of elements with a scale, with zeros elsewhere, and the scale multiplies the scores
instead of the keys. Codes are loaded as 16-bit words in the layout of tensor cores and become
numbers by their bits (`codes`). Scales by channel multiply the queries of each tile. For the
mass, a decode step writes its weights in half precision with the greatest score of each tile, and
`receive` scales them once the log-sum-exp is known; a long chunk reads its keys again (`weigh`).
Lengths and cursors may be tensors, so a step never waits for the device. There is one
configuration per kind of call and no autotuning.

These modules are imported only when a kernel is needed, so that kvkeep works without Triton.
"""
