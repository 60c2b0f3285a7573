"""Plant known faults in kvkeep, one at a time, and see whether the tests catch each.

A tool to run by hand; pytest does not collect it:

    python tests/support/faults.py                    # all of them, with this suite
    python tests/support/faults.py adakv-floor        # these only
    python tests/support/faults.py --tests DIRECTORY  # with another suite

Each fault is one changed line of a copy of src/. Its tests run until the first one fails, and a
table says which one that was. To show that a smaller suite is as strong, run it with both.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800

# An editable install finds its own sources before those of PYTHONPATH.
WITHOUT_EDITABLE = """import sys
sys.meta_path = [x for x in sys.meta_path if "kvkeep" not in type(x).__module__]
"""


class Fault(NamedTuple):
    """A line that is wrong: `old`, which stands exactly once in the files at `place` (a file or a
    folder of src/kvkeep), is replaced by `new`. `tests` are the files that should notice."""

    name: str
    place: str
    old: str
    new: str
    tests: str


FAULTS = (
    # Storage
    Fault(
        "concat-truncates-too-little",
        "storage/concat.py",
        "plane[:, :, :length].clone()",
        "plane[:, :, : length + 1].clone()",
        "storage/test_storage.py layer/test_layer.py",
    ),
    Fault(
        "growing-gives-nothing-back",
        "storage/growing.py",
        "return None if capacity <= self.most(slots) else self.room(slots)",
        "return None",
        "storage/test_growth.py",
    ),
    Fault(
        "no-room-for-what-stays-of-a-chunk",
        "storage/growing.py",
        "self._reallocate(self.bound, self._planes)",
        "pass",
        "storage/test_growth.py",
    ),
    Fault(
        "room-for-encoded-tokens-beyond-the-budget",
        "layer/block_encoded.py",
        "self.blocks.storage_for(slot_count(encoded), rows).append(encoded)",
        "self.blocks.storage.append(encoded)",
        "layer/test_plain_tail.py",
    ),
    Fault(
        "rows-in-another-order",
        "storage/buffer.py",
        "live.copy_(live.index_select(0, index))",
        "live.copy_(live.index_select(0, index.sort().values))",
        "storage/test_storage.py layer/test_rows.py",
    ),
    Fault(
        "views-made-before-a-crop",
        "storage/buffer.py",
        "if not first <= slot < first + len(views):",
        "if slot >= first + len(views):",
        "storage/test_storage.py layer/test_layer.py layer/test_append.py test_properties.py",
    ),
    Fault(
        "eviction-moves-freed-slots",
        "planes.py",
        "torch.sort(freed.to(torch.uint8), dim=2, stable=True)",
        "torch.sort((~freed).to(torch.uint8), dim=2, stable=True)",
        "storage/test_storage.py storage/test_host.py",
    ),
    Fault(
        "fixed-storage-overfull",
        "storage/base.py",
        "if limit is not None and slots > limit:",
        "if limit is not None and slots > limit + 1:",
        "storage/test_storage.py layer/test_layer.py",
    ),
    Fault(
        "parts-truncated-to-one-length",
        "storage/split.py",
        "storage.truncate(max(0, storage.length - fewer))",
        "storage.truncate(min(storage.length, length))",
        "storage/test_split.py",
    ),
    Fault(
        "parts-rows-in-another-order",
        "storage/split.py",
        "own = place[index[mine]]",
        "own = place[index[mine]].sort().values",
        "storage/test_split.py",
    ),
    Fault(
        "heads-evict-late",
        "layer/parted.py",
        "return sum(length - budget for length in longest.values())",
        "return min(length - budget for length in longest.values())",
        "storage/test_split.py policy/test_decisions.py",
    ),
    Fault(
        "host-forgets-what-was-sent-before",
        "storage/host_planes.py",
        "self.write_pending()  # of the previous call",
        "pass",
        "storage/test_host.py",
    ),
    Fault(
        "host-lands-after-a-truncation",
        "storage/host.py",
        "self.large_planes.write_pending()  # before the truncation moves or frees the slots",
        "pass",
        "storage/test_host.py",
    ),
    # Codecs
    Fault(
        "int8-scale",
        "codec/int8.py",
        "groups.abs().amax(dim=-1) / 127",
        "groups.abs().amax(dim=-1) / 128",
        "codec/test_codecs.py",
    ),
    Fault(
        "int4-zero-code",
        "codec/ints.py",
        "x = grouped(codes - 2 ** (self.bits - 1), self.group) * scale",
        "x = grouped(codes - 2 ** (self.bits - 1) + 1, self.group) * scale",
        "codec/test_codecs.py",
    ),
    Fault(
        "ints-scales-biased",
        "codec/ints.py",
        "scale = self._unbiased(groups, codes - middle, scale, x.shape[-1])",
        "scale = scale + 0",
        "codec/test_codecs.py",
    ),
    Fault(
        "int4-affine-zero-unrounded",
        "codec/ints.py",
        "codes = divided(groups - zero.to(high.dtype)[..., None], step)",
        "codes = divided(groups - low[..., None], step)",
        "codec/test_codecs.py",
    ),
    Fault(
        "short-group-filled-with-zeros",
        "codec/groups.py",
        "first = x[..., (groups - 1) * group :][..., :1]",
        "first = torch.zeros_like(x[..., :1])",
        "codec/test_codecs.py",
    ),
    Fault(
        "scale-beyond-half",
        "codec/groups.py",
        "return finite.clamp(-_MOST_HALF, _MOST_HALF).to(torch.float16)",
        "return finite.to(torch.float16)",
        "codec/test_codecs.py",
    ),
    Fault(
        "fp8-scale",
        "codec/fp8.py",
        "groups.abs().amax(dim=-1) / _MOST",
        "groups.abs().amax(dim=-1) / 512",
        "codec/test_codecs.py",
    ),
    Fault(
        "kivi-scale-of-unrounded-zero",
        "codec/kivi.py",
        "codes = divided(groups - zero.float(), scale)",
        "codes = divided(groups - low, scale)",
        "codec/test_codecs.py",
    ),
    Fault(
        "padding-widens-a-block",
        "layer",
        "return torch.where(empty, blocks[:, :, :, -1:], blocks).flatten(2, 3)",
        "return blocks.flatten(2, 3)",
        "layer/test_block_encoded.py",
    ),
    # Policies
    Fault(
        "newest-of-equals-first",
        "policy/ranking.py",
        "by_age = position.argsort(dim=-1, stable=True)",
        "by_age = position.argsort(dim=-1, stable=True, descending=True)",
        "policy/test_ranking.py policy/test_edges.py",
    ),
    Fault(
        "window-of-a-layer-one-longer",
        "policy/ranking.py",
        "dead |= position <= after - seen.window.behind(after)",
        "dead |= position < after - seen.window.behind(after)",
        "policy/test_ranking.py policy/test_edges.py",
    ),
    Fault(
        "protects-one-more",
        "policy/ranking.py",
        "protected |= position > seen.newest - kept.recent",
        "protected |= position >= seen.newest - kept.recent",
        "policy/test_ranking.py",
    ),
    Fault(
        "h2o-forgets",
        "policy/h2o.py",
        "planes[SCORE].add_(seen.mass)",
        "planes[SCORE].copy_(seen.mass)",
        "policy/test_decisions.py",
    ),
    Fault(
        "h2o-divides-by-one-query-fewer",
        "policy/h2o.py",
        "queries = seen.newest + 1 - planes[POSITION]",
        "queries = seen.newest + 2 - planes[POSITION]",
        "policy/test_decisions.py",
    ),
    Fault(
        "snapkv-counts-beyond-its-window",
        "policy/snapkv.py",
        "fed = fed.clamp(max=self.window)",
        "fed = fed.clamp(max=self.window + 1)",
        "policy/test_decisions.py layer/test_rows.py",
    ),
    Fault(
        "snapkv-pools-its-window",
        "policy/snapkv.py",
        "before = (position <= newest - self.window) & (position >= 0)",
        "before = (position < newest - self.window) & (position >= 0)",
        "policy/test_decisions.py",
    ),
    Fault(
        "vlen-ignores-the-length-of-a-chunk",
        "policy/vlen.py",
        "moved / total * seen.fed()",
        "moved / total",
        "policy/test_decisions.py",
    ),
    Fault(
        "qh2o-scales-by-empty-slots",
        "policy/qh2o.py",
        "counted = live & ~x.isnan()",
        "counted = ~x.isnan()",
        "policy/test_decisions.py policy/test_edges.py layer/test_rows.py",
    ),
    Fault(
        "qvlen-forgets-values",
        "policy/qvlen.py",
        "class QVLen(QH2O, VLen):",
        "class QVLen(QH2O):",
        "policy/test_decisions.py",
    ),
    Fault(
        "the-beginning-adds-to-a-window",
        "policy/window.py",
        "return replace(self, size=self.size - added, keep_from=0, keep_to=to)",
        "return replace(self, keep_from=0, keep_to=to)",
        "host/test_keep_until.py",
    ),
    Fault(
        "a-small-share-has-no-room-for-the-beginning",
        "policy/scored.py",
        "self.least + 2 * stop",
        "self.least + stop",
        "host/test_keep_until.py",
    ),
    Fault(
        "a-marker-ends-with-its-token",
        "host/keep_until.py",
        "text in tokenizer.decode(tokens[:count])",
        "tokenizer.decode(tokens[:count]).endswith(text)",
        "host/test_keep_until.py",
    ),
    Fault(
        "keydiff-averages-empty-slots",
        "policy/keydiff.py",
        "unit = torch.where(live, normalize(keys, dim=-1), 0)",
        "unit = normalize(keys, dim=-1)",
        "policy/test_decisions.py policy/test_edges.py layer/test_rows.py",
    ),
    Fault(
        "expected-attention-spread",
        "policy/normal_queries.py",
        "alpha=scale / 2",
        "alpha=1 / 2",
        "policy/test_expected_attention.py",
    ),
    Fault(
        "expected-attention-counts-sinks",
        "policy/expected_attention.py",
        "counts = due & (place >= self.sinks)",
        "counts = due & (place >= 0)",
        "policy/test_expected_attention.py policy/test_decisions.py",
    ),
    Fault(
        "adakv-floor-of-what-is-held",
        "policy/adakv.py",
        "safe = min(slots, max(0, int(self.floor * budget) - seen.plain))",
        "safe = min(slots, int(self.floor * slots))",
        "policy/test_decisions.py",
    ),
    Fault(
        "pyramid-shares-what-is-protected",
        "policy/pyramid.py",
        "tokens = protected + round((budget - protected) * factor)",
        "tokens = round(budget * factor)",
        "policy/test_policies.py policy/test_decisions.py",
    ),
    Fault(
        "replay-evicts-one-empty-slot-twice",
        "policy/replay.py",
        "at = (torch.searchsorted(ordered, wanted) + rank)",
        "at = torch.searchsorted(ordered, wanted)",
        "storage/test_split.py train/test_gradient.py",
    ),
    # Attention
    Fault(
        "a-reach-one-longer",
        "planes.py",
        "return (query - slot < self.size)",
        "return (query - slot <= self.size)",
        "layer/test_layer.py attention/test_attend.py",
    ),
    Fault(
        "no-mask-while-a-window-fills",
        "planes.py",
        "return length > reach.size + reach.sinks if newest else fed > reach.size",
        "return length > reach.size + reach.sinks if newest else fed > reach.size + 1",
        "layer/test_layer.py test_conformance.py",
    ),
    Fault(
        "empty-slots-are-seen",
        "attention/view.py",
        "seen = (slot >= 0) & (slot <= query)",
        "seen = slot <= query",
        "attention/test_attend.py test_conformance.py",
    ),
    Fault(
        "mass-of-one-query-more",
        "attention/view.py",
        "position.amax(dim=1, keepdim=True) - newest)",
        "position.amax(dim=1, keepdim=True) - newest - 1)",
        "attention/test_attend.py attention/test_native.py policy/test_decisions.py",
    ),
    Fault(
        "rotated-runs-chained",
        "attention/view.py",
        "if previous is None or previous.rotation is not None or self.rotation is not None:",
        "if previous is None:",
        "attention/test_chain.py attention/test_native.py blocks/test_join.py",
    ),
    Fault(
        "sdpa-merges-nothing-with-nothing",
        "attention/sdpa.py",
        "weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))",
        "weights = torch.exp(lse - total)",
        "attention/test_attend.py",
    ),
    Fault(
        "sdpa-sinks",
        "attention/sdpa.py",
        "out = out * torch.sigmoid(lse - sink)",
        "out = out * torch.sigmoid(sink - lse)",
        "attention/test_attend.py",
    ),
    Fault(
        "gradient-of-sinks",
        "attention/sdpa.py",
        "sinks = -lost.sum(dim=(0, 2, 3))",
        "sinks = lost.sum(dim=(0, 2, 3))",
        "attention/test_attend.py",
    ),
    Fault(
        "gradient-of-one-query-of-a-group",
        "attention/sdpa.py",
        "dk[:, :, past:] += found[1]",
        "dk[:, :, past:] = found[1]",
        "attention/test_attend.py train/test_gradient.py",
    ),
    Fault(
        "softcap-without-its-factor",
        "attention/reference.py",
        "found = options.softcap * torch.tanh(found / options.softcap)",
        "found = torch.tanh(found / options.softcap)",
        "attention/test_attend.py attention/test_native.py",
    ),
    Fault(
        "rotation-backwards",
        "attention/rotation.py",
        "return self._turned(q, -self.offset)",
        "return self._turned(q, self.offset)",
        "attention/test_attend.py blocks/test_join.py",
    ),
    Fault(
        "sinks-of-the-first-head",
        "attention/__init__.py",
        "sinks = None if options.sinks is None else options.sinks[own]",
        "sinks = None if options.sinks is None else options.sinks[:group]",
        "storage/test_split.py",
    ),
    Fault(
        "slopes-of-the-first-head",
        "attention/__init__.py",
        "slopes = None if options.slopes is None else options.slopes[own]",
        "slopes = None if options.slopes is None else options.slopes[:group]",
        "layer/test_native_step.py",
    ),
    Fault(
        "slopes-of-the-first-head-in-a-plan",
        "layer/decode/records.py",
        "slopes = slopes[part.head * q.shape[1] :]",
        "slopes = slopes[:]",
        "layer/test_native_step.py",
    ),
    Fault(
        "explicit-mass-in-another-order",
        "attention/explicit.py",
        "mass = held.as_slots(received_mass(share, options)).float()",
        "mass = received_mass(share, options).float()",
        "hf/test_weights.py attention/test_attend.py",
    ),
    Fault(
        "native-observed-of-all-rows",
        "attention/native.py",
        "n if observed is not None and observed.shape[0] > 1 else 0,",
        "0,",
        "attention/test_native.py policy/test_decisions.py layer/test_rows.py",
    ),
    # What queries see
    Fault(
        "bounds-of-the-first-rows",
        "attention/view.py",
        "bounds = bounds.index_select(0, rows)",
        "bounds = bounds[: len(rows)]",
        "layer/test_reach.py",
    ),
    Fault(
        "native-bounds-of-the-first-row",
        "attention/native.py",
        "2 * n if bounds is not None and bounds.dim() == 3 else 0,",
        "0,",
        "attention/test_attend.py attention/test_native.py layer/test_reach.py",
    ),
    Fault(
        "chunk-begins-late",
        "layer/sight.py",
        "first = queries + 1 - window.behind(queries) if hidden else None",
        "first = queries - (queries - 1) % window if hidden else None",
        "layer/test_reach.py",
    ),
    Fault(
        "chunk-needs-no-mask-with-a-budget",
        "planes.py",
        "return n > 1 or kept != Reach(self) or length - 1 > (fed - 1) % self",
        "return n > 1 or length - 1 > (fed - 1) % self",
        "layer/test_reach.py",
    ),
    Fault(
        "sinks-that-the-layers-window-has-passed",
        "planes.py",
        "newest = newest and not (kept and kept.sinks and window is not None)",
        "",
        "layer/test_reach.py layer/test_layer.py",
    ),
    Fault(
        "padding-sees-until",
        "layer/writing.py",
        "until = torch.where(position < 0, -1, until.to(k.device)).to(torch.int32)",
        "until = until.to(k.device).to(torch.int32)",
        "layer/test_reach.py",
    ),
    Fault(
        "an-image-cut-in-two",
        "hf/forward/masks.py",
        "before = range(self.fed)",
        "before = range(0)",
        "hf/test_image_blocks.py",
    ),
    Fault(
        "copied-masks-lose-until",
        "hf/forward/attention.py",
        "else (mask[:, 0, 0], mask[:, 0, 1])",
        "else (mask[:, 0, 0], None)",
        "hf/test_image_blocks.py",
    ),
    # Frozen runs and forks
    Fault(
        "forks-share-scores",
        "layer/frozen.py",
        "own=deepcopy(run.own)",
        "own=run.own",
        "test_fork.py",
    ),
    Fault(
        "crop-drops-a-whole-run",
        "layer/frozen.py",
        "own = min(slots, slot_count(run.planes))",
        "own = slot_count(run.planes) * (slots >= slot_count(run.planes))",
        "test_fork.py",
    ),
    Fault(
        "runs-joined-backwards",
        "layer/frozen.py",
        "FrozenPlanes(concatenated(self.planes, following.planes))",
        "FrozenPlanes(concatenated(following.planes, self.planes))",
        "test_fork.py attention/test_chain.py",
    ),
    # Steps, rollback, interrupts
    Fault(
        "aside-is-the-chunk-itself",
        "storage/concat.py",
        "name: plane.clone(memory_format=torch.contiguous_format)",
        "name: plane",
        "layer/test_layer.py",
    ),
    Fault(
        "one-more-slot-within-reach",
        "layer",
        "return min(length, reach.size - 1 + reach.fixed)",
        "return min(length, reach.size + reach.fixed)",
        "layer/test_layer.py test_conformance.py",
    ),
    Fault(
        "rollback-beyond-a-policy",
        "layer",
        "before = oldest.columns - oldest.floor if self._policy.rollback else 0",
        "before = oldest.columns - oldest.floor",
        "layer/test_layer.py",
    ),
    Fault(
        "crop-forgets-padding",
        "layer/history.py",
        "before.pads = self.pads - (newest < 0).sum(dim=1)",
        "before.pads = self.pads",
        "layer/test_layer.py",
    ),
    Fault(
        "padding-sees-the-next-token",
        "layer/history.py",
        "last = self.columns - 1 - before[:, None]",
        "last = self.columns - before[:, None]",
        "test_conformance.py layer/test_rows.py",
    ),
    Fault(
        "shown-columns-keep-their-rows",
        "layer/history.py",
        "if held is not None:\n                setattr(self",
        'if held is not None and name != "kinds":\n                setattr(self',
        "storage/test_split.py",
    ),
    Fault(
        "takes-back-after-an-eviction",
        "layer",
        "if start and not evicted and cursor.state is not State.MOVING:",
        "if start and cursor.state is not State.MOVING:",
        "layer/test_layer.py test_interrupts.py",
    ),
    Fault(
        "rejected-drafts-stay-in-scores",
        "layer/cursor.py",
        "planes[name].copy_(plane)",
        "planes[name].copy_(plane if name == POSITION else planes[name])",
        "layer/test_drafts.py",
    ),
    Fault(
        "drafts-are-taken-back-one-short",
        "layer/cursor.py",
        "if before.history.columns >= columns:",
        "if before.history.columns > columns:",
        "layer/test_drafts.py",
    ),
    Fault(
        "hidden-slots-are-seen",
        "layer/writing.py",
        "hides = slots.frozen.hides or slots.hidden > 0",
        "hides = slots.frozen.hides",
        "layer/test_drafts.py",
    ),
    Fault(
        "drafts-share-a-policys-memory",
        "layer/cursor.py",
        "other.memory = dict(history.memory)",
        "pass",
        "layer/test_drafts.py",
    ),
    Fault(
        "a-prompt-with-drafts-is-one-chunk",
        "hf/generation/generate_hook.py",
        "max(0, call.columns - cache.drafting), start.config.prefill_chunk_size)",
        "max(0, call.columns - cache.drafting))",
        "hf/test_drafts.py",
    ),
    Fault(
        "hidden-blocks-are-encoded-again",
        "layer/block_encoded.py",
        "first = self.tail.hidden  # hidden slots come first in the order: their position is -1",
        "first = 0",
        "layer/test_drafts.py",
    ),
    Fault(
        "half-an-eviction-goes-unnoticed",
        "layer",
        "if not torn and self.slots.mark() == mark:",
        "if True:",
        "test_interrupts.py storage/test_storage.py storage/test_split.py storage/test_growth.py",
    ),
    Fault(
        "crops-some-layers",
        "cache.py",
        "layer.drafts.require_rollback(-tokens)",
        "pass",
        "test_cache.py",
    ),
    Fault(
        "chunk-without-its-last-step",
        "layer/step.py",
        "for first in range(0, self.q.shape[2], most):",
        "for first in range(0, self.q.shape[2] - most + 1, most):",
        "policy/test_steps.py",
    ),
    Fault(
        "steps-leave-rows-together",
        "layer/writing.py",
        "cursor.chunk = inputs.position",
        "pass",
        "policy/test_steps.py",
    ),
    Fault(
        "steps-that-lasted-taken-back",
        "layer/writing.py",
        "if not self.policy.rollback or cursor.history.floor != start[0].floor:",
        "if not self.policy.rollback:",
        "policy/test_steps.py",
    ),
    # Snapshots and files
    Fault(
        "snapshot-is-no-copy",
        "layer/history.py",
        "return LayerState(self.history.fork(), self._each(torch.clone))",
        "return LayerState(self.history.fork(), self._each(lambda x: x))",
        "test_fork.py",
    ),
    Fault(
        "loaded-texts-saw-each-other",
        "files/snapshot.py",
        "history.joined, history.embedded = header.apart, header.embedded",
        "history.joined, history.embedded = False, header.embedded",
        "blocks/test_prompt.py",
    ),
    Fault(
        "damage-is-loaded",
        "files/snapshot.py",
        "if self._verify and tensor_file.checksum(x) != self.header.checksums[name]:",
        "if False:",
        "files/test_snapshot.py hf/test_saved.py",
    ),
    Fault(
        "more-padding-than-columns",
        "files/snapshot.py",
        "within = not x.numel() or least <= int(x.min()) <= int(x.max()) <= most",
        "within = not x.numel() or least <= int(x.min())",
        "files/test_snapshot.py",
    ),
    Fault(
        "replaced-file-loses-its-mode",
        "files/atomic.py",
        "os.fchmod(file.fileno(), before)",
        "pass",
        "files/test_files.py",
    ),
    Fault(
        "tensors-may-overlap",
        "files/tensor_file.py",
        "if entry.start != end:",
        "if False:",
        "files/test_files.py",
    ),
    # Stores and backends
    Fault(
        "store-ignores-priority",
        "store/entries.py",
        "key=lambda found: (found[2].priority, found[2].used)",
        "key=lambda found: found[2].used",
        "store/test_prefix.py",
    ),
    Fault(
        "store-beyond-its-budget",
        "store/entries.py",
        "if new > room:",
        "if False:",
        "store/test_prefix.py",
    ),
    Fault(
        "entry-takes-the-latest-priority",
        "store/tree.py",
        "node.priority = max(node.priority, priority)",
        "node.priority = priority",
        "store/test_prefix.py",
    ),
    Fault(
        "hit-longer-than-its-match",
        "store/hit.py",
        "[one.head(min(len(one), length - one.first)) for one in contents]",
        "[*contents]",
        "store/test_prefix.py",
    ),
    Fault(
        "blocks-without-what-precedes-them",
        "store",
        "before.update(token_bytes(own))",
        "pass",
        "store/test_backends.py",
    ),
    Fault(
        "geometry-of-a-backend-is-believed",
        "store",
        "if not block.tokens.equal(own) or block.why_not(geometry_of(), Stretch, start):",
        "if not block.tokens.equal(own):",
        "store/test_geometry.py",
    ),
    Fault(
        "damaged-block-is-used",
        "store/block.py",
        "if tensor_file.checksum(x) != header.checksums[name]:",
        "if False:",
        "store/test_backends.py store/test_disk_damage.py store/test_disk.py",
    ),
    Fault(
        "positions-of-a-block-unseen",
        "store/layer_slices.py",
        "planes[POSITION].flatten().cpu().equal(positions)",
        "True",
        "store/test_geometry.py store/test_backends.py files/test_mutations.py",
    ),
    Fault(
        "beginning-evicted-before-its-end",
        "store/disk.py",
        "used = now - 1e-5 * index",
        "used = now + 1e-5 * index",
        "store/test_backends.py store/test_disk.py",
    ),
    Fault(
        "uses-by-other-processes-unseen",
        "store/files.py",
        "if now.used > file.used:",
        "if False:",
        "store/test_disk.py",
    ),
    Fault(
        "gc-removes-what-is-being-written",
        "store/files.py",
        "if file.used <= before:",
        "if True:",
        "store/test_disk.py store/test_backends.py store/test_disk_damage.py",
    ),
    # Caches that begin with exact slots
    Fault(
        "beginning-without-scores-of-its-own",
        "layer/beginning.py",
        "mine = {name: x.expand(history.rows, *x.shape[1:]).clone() for name, x in own.items()}",
        "mine = {n: x.expand(history.rows, *x.shape[1:]).clone() * 0 for n, x in own.items()}",
        "layer/test_beginning.py",
    ),
    Fault(
        "eviction-from-shared-slots-in-another-order",
        "storage/base.py",
        "return order.scatter(2, holes, movers)[:, :, : length - count]",
        "return order.scatter(2, holes, movers)[:, :, : length - count].sort(dim=2).values",
        "layer/test_beginning.py",
    ),
    Fault(
        "slots-of-a-later-run-taken-from-the-first",
        "planes.py",
        "later = along_slots(index >= start, plane)",
        "later = along_slots(index > start, plane)",
        "layer/test_beginning.py",
    ),
    Fault(
        "queries-that-a-policy-needs-are-not-fed",
        "store/beginning.py",
        "return max(again, default=0)",
        "return min(1, len(again))",
        "store/test_budgets.py",
    ),
    Fault(
        "a-budget-has-slots-of-its-own-codec",
        "store/beginning.py",
        "return CacheSpec(KeepAll())",
        "return replace(spec, policy=KeepAll())",
        "store/test_budgets.py",
    ),
    Fault(
        "scores-are-stored",
        "store/layer_slices.py",
        "for n in planes if n not in layer.policy.planes",
        "for n in planes",
        "store/test_budgets.py",
    ),
    Fault(
        "codes-pass-for-exact-slots",
        "store/prefix.py",
        "alike = encodes_alike(cache.specs, exact_specs(cache.specs))",
        "alike = True",
        "store/test_budgets.py",
    ),
    Fault(
        "padding-stays-before-shared-tokens",
        "hf/generation/filling.py",
        "real = ((columns < found.fed) | (columns >= found.fed + pads)).long()",
        "real = ((columns < found.fed) | (columns >= pads)).long()",
        "store/test_rows.py",
    ),
    Fault(
        "rows-begin-as-the-first-two-do",
        "store/prefix.py",
        "min(most, *(common(prompts[0], one) for one in prompts))",
        "min(most, common(prompts[0], prompts[1 % len(prompts)]))",
        "store/test_rows.py",
    ),
    Fault(
        "moved-keys-begin-where-they-were",
        "layer/beginning.py",
        "for planes in frozen.placed(codecs.key):",
        "for planes in [run.joined for run in frozen.runs]:",
        "blocks/test_budgets.py",
    ),
    # Joined texts, and tokens that are computed again
    Fault(
        "moved-text-passes-for-a-beginning",
        "blocks/join.py",
        "history.joined = len(parts) > 1 or parts[0][1] > 0 or parts[0][0].history.joined",
        "history.joined = len(parts) > 1",
        "blocks/test_join.py",
    ),
    Fault(
        "moved-twice",
        "blocks/join.py",
        "position = run.joined[POSITION] - already",
        "position = run.joined[POSITION]",
        "blocks/test_join.py",
    ),
    Fault(
        "computes-again-what-differs-least",
        "blocks/recomputation.py",
        "self.index = differ.topk(self._count)",
        "self.index = (-differ).topk(self._count)",
        "blocks/test_prefill.py",
    ),
    Fault(
        "hidden-tokens-saved",
        "layer/frozen.py",
        "seen = (planes[POSITION][0, 0] >= 0).nonzero().flatten()",
        "seen = (planes[POSITION][0, 0] >= -1).nonzero().flatten()",
        "blocks/test_prefill.py blocks/test_join.py",
    ),
    # Gradients
    Fault(
        "gradients-replace-each-other",
        "train/slots.py",
        "buffer[:, :, : self.length] += gradient",
        "buffer[:, :, : self.length] = gradient",
        "train/test_gradient.py",
    ),
    Fault(
        "gradients-summed-in-half",
        "train/slots.py",
        "dtype=torch.promote_types(x.dtype, torch.float32)",
        "dtype=x.dtype",
        "train/test_gradient.py train/test_heads_and_draws.py",
    ),
    Fault(
        "slots-back-in-another-order",
        "train/slots.py",
        "torch.empty_like(moved).scatter_(2, along_slots(order, moved), moved)",
        "moved.gather(2, along_slots(order, moved))",
        "train/test_gradient.py",
    ),
    Fault(
        "gradient-of-a-chunk-lost",
        "train/walk.py",
        "slots.absorb(step.past.keys.grad, step.past.values.grad)",
        "slots.absorb(step.past.keys.grad, None)",
        "train/test_gradient.py",
    ),
    Fault(
        "same-dropout-in-each-chunk",
        "train/walk.py",
        "seed(self._seed + (layer + 1) * self._all + number)",
        "seed(self._seed + (layer + 1) * self._all)",
        "train/test_heads_and_draws.py",
    ),
    Fault(
        "labels-of-padding",
        "train/losses.py",
        "learned &= nn.functional.pad(decoder.attention_mask[:, 1:].bool(), (0, 1))",
        "pass",
        "train/test_gradient.py train/test_heads_and_draws.py",
    ),
    # The server's page
    Fault(
        "page-under-any-name",
        "serve/http/gate.py",
        """.lower()} if known else set()""",
        """.lower()}""",
        "serve/test_access.py",
    ),
    Fault(
        "shows-new-slots-as-shared",
        "page/picture.py",
        "index < len(slots.frozen.runs)",
        "index <= len(slots.frozen.runs)",
        "page/test_picture.py",
    ),
    Fault(
        "claims-more-of-a-stored-text",
        "store/tree.py",
        "min(len(node.tokens), left) for node, left in left_in",
        "len(node.tokens) for node, left in left_in",
        "store/test_outline.py",
    ),
    # transformers
    Fault(
        "bytes-of-the-heads-of-other-processes",
        "hf/kinds/__init__.py",
        "made = Geometry(1, heads // processes, width + kind.beside, width, dtype)",
        "made = Geometry(1, heads, width + kind.beside, width, dtype)",
        "hf/test_tensor_parallel.py",
    ),
    Fault(
        "parts-of-weights-are-not-hashed",
        "host/tensors.py",
        "if not isinstance(part, DeviceMesh):",
        "if not isinstance(part, DeviceMesh | Tensor):",
        "hf/test_tensor_parallel.py hf/test_saved.py",
    ),
    Fault(
        "features-are-taken-for-text",
        "hf/kinds/multimodal.py",
        "leaves = tree_leaves([x for name, x in given.items() if name not in beside])",
        "leaves = [x for name, x in given.items() if name not in beside]",
        "hf/test_multimodal.py",
    ),
    Fault(
        "positions-of-the-last-prompt",
        "hf/kinds/multimodal.py",
        "part.__dict__[_DELTAS] = None if cache.offset is None else cache.offset[:, None]",
        "pass",
        "hf/test_multimodal.py",
    ),
    Fault(
        "images-are-not-recorded",
        "layer/history.py",
        "self.embedded, self.offset = True, offset",
        "self.offset = offset",
        "hf/test_multimodal.py",
    ),
    Fault(
        "offsets-of-other-rows",
        "layer/history.py",
        "setattr(self, name, held.index_select(0, index.to(held.device)))",
        "setattr(self, name, held[: len(index)] if name == 'offset' else held[index])",
        "hf/test_multimodal.py",
    ),
    Fault(
        "other-padding-than-was-fed",
        "hf/forward/masks.py",
        "if not _was_fed(layer, before):",
        "if False:",
        "hf/test_generate.py hf/test_window.py hf/test_attach.py storage/test_split.py",
    ),
    Fault(
        "window-other-than-the-config-says",
        "hf/forward/attention.py",
        "if asked is not None and asked.window != handed.layer.window:",
        "if False:",
        "hf/test_attach.py hf/test_window.py hf/test_rehearsal.py",
    ),
    Fault(
        "keys-attended-to-twice",
        "hf/forward/attention.py",
        "if handed.taken and not _is_read(handed):",
        "if False:",
        "hf/test_attach.py hf/test_rehearsal.py",
    ),
    Fault(
        "keys-changed-in-place",
        "hf/forward/attention.py",
        "handed.versions != (key._version, value._version)",
        "handed.versions is None",
        "hf/test_attach.py hf/test_rehearsal.py",
    ),
    Fault(
        "draft-stops-recording",
        "hf/interface/transformers_names.py",
        "if not self._uncropped or self.drafting:",
        "if not self._uncropped:",
        "hf/test_generate.py",
    ),
    Fault(
        "columns-of-a-window-from-zero",
        "hf/interface/transformers_names.py",
        "return length, fed - kept",
        "return length, 0",
        "hf/test_window.py hf/test_attach.py hf/test_generate.py hf/test_families.py",
    ),
    # LitGPT
    Fault(
        "litgpt-mask-stays-behind",
        "litgpt/attach.py",
        "if gpt.mask_cache.device != input_pos.device:",
        "if gpt.mask_cache is None:",
        "litgpt/test_devices.py",
    ),
    Fault(
        "litgpt-feed-computes-logits",
        "litgpt/host.py",
        "        _fed(self.model, ids, cache, position)",
        "        self.forward(ids, cache, position=position)",
        "litgpt/test_train.py",
    ),
    Fault(
        "litgpt-frequencies-not-compared",
        "host/translation.py",
        "torch.allclose(x, y, _SAME_FREQUENCY, 0)",
        "torch.allclose(x, x, _SAME_FREQUENCY, 0)",
        "litgpt/test_translation.py",
    ),
    Fault(
        "litgpt-keys-not-compared",
        "host/translation.py",
        "or not float((x - y).norm()) <= most * float(y.norm())",
        "or not float(y.norm()) >= 0",
        "litgpt/test_translation.py",
    ),
    Fault(
        "litgpt-lora-trains-everything",
        "litgpt/lora.py",
        "    lora.mark_only_lora_as_trainable(found)",
        "    found.requires_grad_(True)",
        "litgpt/test_finetune.py",
    ),
)


class Outcome(NamedTuple):
    """`by`: the test that failed, empty if none did."""

    by: str
    seconds: float


def located(fault: Fault, package: Path) -> tuple[Path, str]:
    """The file of the package that a fault changes, and its text.

    Raises:
        SystemExit: the fault's line does not stand there exactly once.
    """
    place = package / fault.place
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    found = [(file, file.read_text()) for file in files]
    count = sum(text.count(fault.old) for _, text in found)
    if count != 1:
        raise SystemExit(f"{fault.name}: {count} times in {fault.place}, not once: {fault.old}")
    return next((file, text) for file, text in found if fault.old in text)


def plant(fault: Fault, package: Path) -> tuple[Path, str]:
    """Put a fault into a copy of the package; the file it is in, and what stood there."""
    file, text = located(fault, package)
    file.write_text(text.replace(fault.old, fault.new))
    return file, text


def run(fault: Fault, suite: Path, source: Path) -> Outcome:
    """Run a fault's tests until one fails.

    Raises:
        SystemExit: they could not be run.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()  # of a process that has imported what takes seconds
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os._exit(tested([suite / name for name in fault.tests.split()], suite, source))
        status = ended(child, started + SECONDS)
        seconds = time.monotonic() - started
        output.seek(0)
        text = output.read()
    if status is None:
        return Outcome("it took too long", seconds)
    if status == 0:
        return Outcome("", seconds)
    if status < 0:
        return Outcome(f"it ended by signal {-status}", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (\S*::.*?)(?: - .*)?$", text, re.MULTILINE)
    if status != 1 or failed is None:  # a fault should break no import
        raise SystemExit(f"{fault.name}: no test was run\n{text}")
    return Outcome(failed.group(1).rpartition("tests/")[2], seconds)


def tested(tests: list[Path], suite: Path, source: Path) -> int:
    """pytest's exit status, in a process of its own."""
    import pytest

    os.chdir(suite.parent)
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.meta_path = [x for x in sys.meta_path if "kvkeep" not in type(x).__module__]
    sys.path.insert(0, str(source))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    status = pytest.main([*options, *map(str, tests)])
    sys.stdout.flush()
    return int(status)


def ended(child: int, until: float) -> int | None:
    """A process's exit status, negative for a signal; None if it had to be killed."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)


def import_early() -> None:
    """Import what most tests do, but nothing of kvkeep, so that no test waits for it."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as the tests' conftest does
    for name in (
        "hypothesis",
        "pytest",
        "safetensors.torch",
        "torch._dynamo",
        "torch.distributed.tensor",
        "transformers",
        "transformers.models.gemma3.modeling_gemma3",
        "transformers.models.llama.modeling_llama",
        "peft",
    ):
        importlib.import_module(name)
    if any(name.partition(".")[0] == "kvkeep" for name in sys.modules):
        raise SystemExit("kvkeep itself was imported, and not the copy")


def require_copy(source: Path) -> None:
    """Raise SystemExit unless the copy is what tests import."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    asked = [sys.executable, "-c", "import kvkeep; print(kvkeep.__file__)"]
    found = subprocess.run(asked, capture_output=True, text=True, env=environment, cwd=source)
    if not found.stdout.startswith(str(source)):
        raise SystemExit(f"tests would import {found.stdout or found.stderr}, not the copy")


def main() -> None:
    parser = argparse.ArgumentParser(description="planted faults, and the tests that catch them")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; none: all")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="another suite")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="another src/")
    options = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    unknown = sorted(set(options.names) - set(known))
    if unknown or len(known) < len(FAULTS):
        raise SystemExit(f"no such faults: {', '.join(unknown)}")
    chosen = [known[name] for name in options.names or known]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src").resolve()
        shutil.copytree(options.source, source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
        require_copy(source)
        for fault in chosen:  # all of them fit the source before any test is run
            file, text = plant(fault, source / "kvkeep")
            file.write_text(text)
        import_early()
        print("| fault | outcome | by | seconds |\n|---|---|---|---|", flush=True)
        for fault in chosen:
            file, text = plant(fault, source / "kvkeep")
            found = run(fault, options.tests.resolve(), source)
            file.write_text(text)
            missed += [] if found.by else [fault.name]
            outcome = "caught" if found.by else "MISSED"
            print(f"| {fault.name} | {outcome} | {found.by} | {found.seconds:.0f} |", flush=True)
    print(f"\n{len(chosen) - len(missed)} of {len(chosen)} caught; missed: {missed}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
