"""The presses of kvpress that are compared; nothing here imports torch."""

PRESSES = (
    "none",
    "snapkv",
    "adakv",
    "criticaladakv",
    "pyramid",
    "knorm",
    "keydiff",
    "streaming",
    "tova",
    "expected_attention",
    "observed_attention",
    "kvzip",
)
"""Names of the presses; `none` compresses nothing, and shows what other versions change."""
