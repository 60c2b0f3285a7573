"""ReadAgain: a layer whose slots other layers attend to."""

from __future__ import annotations

from torch import Tensor

from kvkeep.attention import Attend, Options, View, dispatch
from kvkeep.checks import wants_gradients
from kvkeep.codec import Codec
from kvkeep.errors import StateError
from kvkeep.layer.settling import Settling
from kvkeep.layer.step import StepInputs
from kvkeep.policy import Observation
from kvkeep.storage import Storage


class ReadAgain(Settling):
    """A layer that lets `readers` layers without slots of their own attend to its slots, after its
    step in the same forward.

    The policy observes and evicts after the last of these readings, so each of them attends to what
    the step attended to. It observes the step alone: how many of a chunk's queries a reading has
    depends on which logits are asked for, and that must not decide what stays.
    """

    @property
    def unread(self) -> int:
        """How many of the `readers` have not attended since the last step."""
        return self.cursor.unread

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Attend to the slots that the last step attended to. Nothing is written.

        Args:
            inputs: queries (B, Hq, m, Dk) of the newest m tokens of the step's chunk, and the
                step's own keys and values.
            attend: replaces the attention function; None uses `dispatch`.

        Returns:
            (B, Hq, m, Dv)

        Raises:
            StateError: no step has been made, or as many readings as `readers` followed it.
            ShapeError: the queries do not fit the keys.
        """
        q, k, cursor = inputs.q, inputs.k, self.cursor
        with cursor.turn:
            if not cursor.unread:
                raise StateError(
                    f"a layer attends to the slots of another, which {self.readers} may do after "
                    "each of its steps; feed that layer first"
                )
            self._checks.queries(q, k[:, :, -q.shape[2] :], inputs.sinks, inputs.softcap)
            self.check_gradients(q)
            view = self._view(*(cursor.queries or (None, None)))
            # All of the view's limits hold for some of its queries too.
            n = q.shape[2]
            bounds = None if view.bounds is None else view.bounds[..., -n:]
            view = view._replace(position=view.position[..., -n:], bounds=bounds)
            options = Options(inputs.scale, inputs.softcap, inputs.sinks)
            out, _ = (attend or dispatch)(q, view, options)
            if cursor.unread == 1:
                self._settle_now(cursor.observed, packs=attend is None)
                cursor.observed = None
            cursor.unread -= 1  # last: after an error the forward counts as interrupted
            return out

    def _settle(self, observation: Observation) -> None:
        """Pass the observation to the policy, and evict; at once, or after the readings."""
        if self.readers:
            self._await_readings(observation)
        else:
            self._settle_now(observation, packs=False)

    def _await_readings(self, observation: Observation | None = None) -> None:
        """Note at the end of a step that readings follow it."""
        self.cursor.unread, self.cursor.observed = self.readers, observation

    def _view(self, queries: Tensor | None, until: Tensor | None) -> View:
        """What queries at these positions attend to; None: those of the newest token."""
        slots, history = self.cursor.slots, self.cursor.history
        if queries is None:
            assert history.geometry is not None
            queries = history.next_positions(1, history.geometry.device) - 1
        hides = slots.frozen.hides or slots.hidden > 0
        return self.sight.after(slots.segments(), queries, history, slots.length, hides, until)

    def check_gradients(self, *tensors: Tensor) -> None:
        """Raise StateError if gradients are required that storage or a codec cannot propagate."""
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
