"""SharedSlots: a layer whose slots other layers attend to."""

from __future__ import annotations

from torch import Tensor

from kvkeep.attention import Attend, View, dispatch
from kvkeep.checks import wants_gradients
from kvkeep.codec import Codec
from kvkeep.errors import StateError
from kvkeep.layer.settling import Settling
from kvkeep.layer.step import Slopes, StepInputs
from kvkeep.policy import Observation
from kvkeep.storage import Storage


class SharedSlots(Settling):
    """A layer whose slots `readers` other layers, which have no slots of their own, attend to after
    its step in the same forward.

    The policy observes and evicts after the last of these readings, so each reading attends to the
    same slots as the step. The policy observes the step alone: which logits are requested decides
    how many of a chunk's queries a reading has, and must not decide which slots stay.
    """

    slopes: Slopes | None

    @property
    def unread(self) -> int:
        """Number of `readers` that have not yet attended since the last step."""
        return self.cursor.unread

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Attend to the slots of the last step. Nothing is written.

        Args:
            inputs: queries (B, Hq, m, Dk) of the newest m tokens of the step's chunk, and the
                step's keys and values.
            attend: replaces the attention function; None uses `dispatch`.

        Returns:
            (B, Hq, m, Dv)

        Raises:
            StateError: no step was made, or `readers` readings have followed it already.
            ShapeError: the queries do not fit the keys.
        """
        q, k, cursor = inputs.q, inputs.k, self.cursor
        with cursor.turn:
            if not cursor.unread:
                raise StateError(
                    "a layer attends to another layer's slots, but all its "
                    f"{self.readers} readings after the last step are done; feed that layer first"
                )
            own = k[:, :, -q.shape[2] :]
            self._checks.queries(q, own, inputs.sinks, inputs.softcap, self.slopes)
            self.check_gradients(q)
            view = self._view(*(cursor.queries or (None, None)))
            # Every limit of the view also holds for a subset of its queries.
            n = q.shape[2]
            bounds = None if view.bounds is None else view.bounds[..., -n:]
            view = view._replace(position=view.position[..., -n:], bounds=bounds)
            out, _ = (attend or dispatch)(q, view, inputs.options(self.slopes, self.centre))
            if cursor.unread == 1:
                self._settle_now(cursor.observed, packs=attend is None)
                cursor.observed = None
            cursor.unread -= 1  # last, so that after an error the forward counts as interrupted
            return out

    def await_readings(self) -> None:
        """Record, after a native step of one token, that readings follow."""
        self.cursor.queries = None
        self._await_readings()

    def _settle(self, observation: Observation) -> None:
        """Pass the observation to the policy and evict, now or after the readings."""
        if self.readers:
            self._await_readings(observation)
        else:
            self._settle_now(observation, packs=False)

    def _await_readings(self, observation: Observation | None = None) -> None:
        """Record at the end of a step that readings follow."""
        self.cursor.unread, self.cursor.observed = self.readers, observation

    def _view(self, queries: Tensor | None, until: Tensor | None) -> View:
        """The view of queries at these positions; None: of the newest token."""
        slots, history = self.cursor.slots, self.cursor.history
        if queries is None:
            assert history.geometry is not None
            queries = history.next_positions(1, history.geometry.device) - 1
        hides = slots.frozen.hides or slots.hidden > 0
        return self.sight.after(slots.segments(), queries, history, slots.length, hides, until)

    def check_gradients(self, *tensors: Tensor) -> None:
        """Raise StateError if gradients are required that the storage or a codec does not
        propagate."""
        if wants_gradients(*tensors):
            parts: dict[str, Storage | Codec] = {
                "storage": self.cursor.slots.storage,
                "codec of keys": self.key_codec,
                "codec of values": self.value_codec,
            }
            for kind, part in parts.items():
                if not part.differentiable:
                    raise StateError(
                        f"this cache does not propagate gradients: its {kind} is {part.name!r}; "
                        "run the forward in torch.no_grad(), train with kvkeep.train, or end the "
                        "spec with +plain@concat"
                    )
