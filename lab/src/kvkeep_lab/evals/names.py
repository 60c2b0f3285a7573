"""Names of tasks and presses. Nothing here imports torch, so that shells complete them quickly."""

from __future__ import annotations

GROUPS = {
    "ruler": (
        *("needle", "multi-key", "multi-value", "multi-query"),
        *("variables", "common-words", "frequent-words", "qa"),
    ),
    "longbench": (
        *("passage-retrieval", "passage-count", "multi-document-qa", "few-shot"),
        "code-completion",
    ),
    "helmet": ("key-value", "reranking", "many-shot", "citations"),
}
"""The names of the tasks of each group."""

TASKS = (*GROUPS, "all", *(name for group in GROUPS.values() for name in group))
"""Names of groups of tasks, and of tasks."""

PRESSES = (
    *("none", "snapkv", "adakv", "criticaladakv", "pyramid", "knorm", "keydiff", "streaming"),
    *("tova", "expected_attention", "observed_attention", "kvzip"),
)
"""Names of kvpress's presses; `none` compresses nothing, and shows the effect of other versions."""
