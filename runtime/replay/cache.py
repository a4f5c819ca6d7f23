"""A cache whose short windows are replayed as graphs; the eager one where they cannot be."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ddaudit.runtime.caches.cache import VerifiableCache
from ddaudit.runtime.caches.delta_window import GatedDeltaWindow
from ddaudit.runtime.caches.history import Tokens
from ddaudit.runtime.caches.window import Window, WindowReading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from ddaudit.runtime.replay.target import TargetGraphs


class ReplayedCache(VerifiableCache):
    """A `VerifiableCache` over the fixed memory of `graphs`, with the same promises.

    The one thing that is read from the device is a tree's mask, and that while its graph runs.
    """

    def __init__(self, model: nn.Module, max_length: int | None, graphs: TargetGraphs) -> None:
        self._window: Window | None = None
        self._reading: WindowReading | None = None
        self._visible: torch.Tensor | None = None
        self._is_asked = self._is_prefill = False
        self._is_replayed = False
        self._graphs = graphs
        super().__init__(model, max_length)

    @property
    def window(self) -> Window | None:
        if self._reading is not None:
            self._window, self._reading = self._reading.window(), None
        return self._window

    @window.setter
    def window(self, window: Window | None) -> None:
        self._window, self._reading = window, None

    @property
    def start(self) -> int:
        """Tokens before the open window, whose tree need not be known for it."""
        if self._reading is not None:
            return self._reading.start
        return self._window.start if self._window is not None else self.get_seq_length()

    def _start_window(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        self._is_replayed = False
        is_whole = module is self._live_model()
        self._is_asked = is_whole and self._graphs.takes(self, kwargs)
        self._is_prefill = is_whole and not self._is_asked and self._graphs.takes_in_pieces(self, kwargs)
        if not self._is_asked:
            if not is_whole and self.get_seq_length():
                self._graphs.refuse_part(module)
            super()._start_window(module, kwargs)
            return
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        start, length = self.get_seq_length(), ids.shape[1]
        self._check_room(start + length)
        self._visible = None
        if mask is None:
            self.window = Window.chain(start, length)
        else:
            self.window = None
            self._reading = WindowReading.begin(mask, start, length)
            self._visible = self._reading.tree
        self._feeding = None if self._holds_images else Tokens(ids, kwargs.get("position_ids"))

    def replayed(self, kwargs: dict[str, Any], stock: Callable[..., Any]) -> Any:
        """The output of the forward that was just opened with `kwargs`; None where stock code runs it as it is.

        The first forward of each window size also runs eagerly, and its graph is used only if both agree.
        """
        if self._is_prefill:
            return self._graphs.prefill(self, kwargs)
        if not self._is_asked:
            return None
        self._is_asked = False
        start, length = self.start, kwargs["input_ids"].shape[1]
        output = self._graphs.forward(self, kwargs, self._visible)
        self._read_tree()
        if output is None:
            return self._eagerly(kwargs, stock)
        if not self._graphs.is_proven(length):
            with self._graphs.in_place(self):
                expected = self._eagerly(kwargs, stock)
            if not self._graphs.prove(length, output.logits, expected.logits):
                return expected
        for recurrent in self.recurrent.values():
            recurrent.is_folded = False
            recurrent.close(())
        self._graphs.show(self, start + length)
        self._is_replayed = True
        return output

    def _read_tree(self) -> None:
        """Off the critical path: the graph runs by now, and the mask was on its way before it started.

        Raises:
            ValueError: where the mask is no tree. The cache is as before the forward.
        """
        try:
            _ = self.window
        except ValueError:
            # Nothing of it is in the cache: no forward was begun.
            self.window = self._forward_of = None
            raise

    def _eagerly(self, kwargs: dict[str, Any], stock: Callable[..., Any]) -> Any:
        super()._start_window(self._live_model(), kwargs)
        return stock(**kwargs)

    def leave(self) -> None:
        """Take what is held out of the graphs' memory, the open window too."""
        if not self._graphs.holds(self):
            return
        if self._is_replayed:
            self._is_replayed = False
            window = self.window
            assert window is not None
            for index, (inputs, factors) in self._graphs.factors(window.length).items():
                recurrent = self.recurrent[index]
                assert isinstance(recurrent, GatedDeltaWindow)
                recurrent.adopt(window, inputs, factors)
        self._graphs.release(self)

    def reset(self) -> None:
        super().reset()
        # What the graphs still hold is nobody's.
        self._is_replayed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayedCache:
        self.leave()
        # The graphs are the model's.
        memo[id(self._graphs)] = self._graphs
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _close_layers(self, length: int, indices: Sequence[int]) -> None:
        window = self.window
        is_replayed, self._is_replayed = self._is_replayed, False
        if is_replayed and window is not None and length == window.length:
            self._graphs.commit(self, length, list(indices))
        else:
            # A window that was not replayed, or further back than it: attention layers are cut where they are.
            super()._close_layers(length, indices)
