"""ReadAgain: the part of `LayerCache` that lets other layers attend to its slots."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from kvkeep.attention import Attend, Options, View, dispatch
from kvkeep.checks import Checks
from kvkeep.errors import StateError
from kvkeep.layer.step import Step, StepInputs
from kvkeep.layer.turn import Turn
from kvkeep.policy import Observation


class ReadAgain(Step):
    """The part of `LayerCache` that lets layers without slots of their own attend to its slots,
    after its step in the same forward.

    The policy observes and evicts after the last of these readings, so each of them attends to what
    the step attended to. It observes the step alone: how many of a chunk's queries a reading has
    depends on which logits are asked for, and that must not decide what stays.

    Attributes:
        readers: how many readings follow each step.
        unread: how many of them are to come.
    """

    turn: Turn
    readers: int
    unread: int
    _checks: Checks
    _observed: Observation | None = None  # what the policy observes after the readings
    _queries: tuple[Tensor, Tensor | None] | None = None
    """Positions of the last chunk's queries, and until which they see; None: of one token."""

    @abstractmethod
    def _view(self, queries: Tensor | None, until: Tensor | None) -> View:
        """What queries at these positions attend to; None: those of the newest token."""

    @abstractmethod
    def _settle_now(self, observation: Observation | None, *, packs: bool) -> None:
        """Pass the observation to the policy, and evict. `packs`: free many empty slots too."""

    @abstractmethod
    def check_gradients(self, *tensors: Tensor) -> None:
        """See `LayerCache.check_gradients`."""

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
        q, k = inputs.q, inputs.k
        with self.turn:
            if not self.unread:
                raise StateError(
                    f"a layer attends to the slots of another, which {self.readers} may do after "
                    "each of its steps; feed that layer first"
                )
            self._checks.queries(q, k[:, :, -q.shape[2] :], inputs.sinks, inputs.softcap)
            self.check_gradients(q)
            view = self._view(*(self._queries or (None, None)))
            # All of the view's limits hold for some of its queries too.
            n = q.shape[2]
            bounds = None if view.bounds is None else view.bounds[..., -n:]
            view = view._replace(position=view.position[..., -n:], bounds=bounds)
            options = Options(inputs.scale, inputs.softcap, inputs.sinks)
            out, _ = (attend or dispatch)(q, view, options)
            if self.unread == 1:
                self._settle_now(self._observed, packs=attend is None)
                self._observed = None
            self.unread -= 1  # last: after an error the forward counts as interrupted
            return out

    def require_read(self) -> None:
        """Raise StateError if readings of the last step are to come."""
        if self.unread:
            raise StateError(
                f"{self.unread} of the layers that share this layer's keys and values have not "
                "attended to its last tokens: a forward was interrupted; rewind() or reset() the "
                "cache"
            )

    def _await_readings(self, observation: Observation | None = None) -> None:
        """Note at the end of a step that readings follow it."""
        self.unread, self._observed = self.readers, observation

    def _forget_readings(self) -> bool:
        """Expect no readings any more; whether some were expected."""
        expected, self.unread, self._observed = self.unread > 0, 0, None
        return expected
