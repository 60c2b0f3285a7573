"""The former name of `kvkeep.generate`."""

raise ImportError(
    "kvkeep.batch is now kvkeep.generate, and Settings and Sampling are now SamplingParams; import "
    "them from there",
    name="kvkeep.batch",
)
