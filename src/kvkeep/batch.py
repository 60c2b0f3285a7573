"""The former name of `kvkeep.generate`."""

raise ImportError(
    "kvkeep.batch is now kvkeep.generate, whose SamplingParams holds what Settings and Sampling "
    "held; import from there",
    name="kvkeep.batch",
)
