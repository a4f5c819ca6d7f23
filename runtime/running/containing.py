"""Running a repository's code so that what it does to the process ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def closed_off() -> Iterator[None]:
    """No command line, no input to wait for, and no way to end the process before its record is written.

    All is as it was on leaving.
    """
    process, argv, stdin, leave = os.getpid(), sys.argv, sys.stdin, os._exit

    def ask_to_leave(status: int) -> NoReturn:
        if os.getpid() == process:
            raise SystemExit(status)
        leave(status)  # a forked child, whose right it is

    with open(os.devnull, encoding="utf-8") as nothing:
        sys.argv, sys.stdin = argv[:1], nothing
        os._exit = ask_to_leave
        try:
            yield
        finally:
            sys.argv, sys.stdin, os._exit = argv, stdin, leave


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Put the working folder, the signals and torch's switches back as they were: the next entry counts on them."""
    folder = os.getcwd()
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    precision, threads, numbers = torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.get_rng_state()
    with signals_kept():
        try:
            yield
        finally:
            os.chdir(folder)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
            torch.set_float32_matmul_precision(precision)
            torch.set_rng_state(numbers)
            if torch.get_default_device() != device:
                torch.set_default_device(device)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Ctrl-C and SIGTERM mean afterwards what they meant before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
