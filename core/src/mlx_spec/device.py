"""Where a pair's arrays live: streams that any thread may use, one thread at a time.

MLX gives every thread streams of its own, and an array that was built but not evaluated in one thread cannot
be evaluated in another. What belongs to a pair is therefore built and run on streams of the pair, which are
bound to no thread. MLX does not guard those: only who has the device's turn may use them.

MLX also keeps Python objects per thread (traced graphs, the random state) and drops them when the thread ends. If
the interpreter goes down in that moment, or has gone before, the process aborts. So only two kinds of threads run
MLX here: the main thread, where MLX clears up in time, and a daemon of the device, which never ends.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from .turns import Claim, Turns

if TYPE_CHECKING:
    import mlx.core as mx

T = TypeVar("T")
log = logging.getLogger("mlx_spec.engine")
EXIT_WAIT = 30.0  # seconds a process that exits waits for the unit of work another thread is in


class Device:
    """The streams of one pair, and whose turn it is to use them."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._means: _Means | None = None
        self._streams: list[mx.Stream] = []
        self._runner: int | None = None  # thread that is inside `run`

    def run(self, work: Callable[[], T]) -> T:
        """What `work()` returns or raises; it runs on the streams of this device, alone on it.

        In the main thread it runs at once, for other threads in the device's own one. May be nested.
        """
        if self._runner == threading.get_ident():
            return work()
        if _leaving and _is_main():
            return self._inside(work)  # an exit function; the turn is the main thread's for good
        turn = self._turns.claim()
        try:
            turn.take()
            if self._means is None:
                self._means = _take_means(self)
            if _is_main() and not _homeless:
                return self._inside(work)
            default = sys.modules["mlx.core"].default_device() if "mlx.core" in sys.modules else None
            return self._means.hand.call(lambda: self._inside(work, default))
        finally:
            turn.give()

    def _inside(self, work: Callable[[], T], default: mx.Device | None = None) -> T:
        with importing():
            import mlx.core as mx

        if not self._streams:
            means = self._means or _take_means(self)
            self._streams = means.streams(default or mx.default_device())
        try:
            self._runner = threading.get_ident()
            with ExitStack() as entered:
                for stream in self._streams:
                    entered.enter_context(mx.stream(stream))
                return work()
        finally:
            self._runner = None


class _Means:
    """Streams and a thread for one device at a time; kept for the next one, since neither can be freed."""

    def __init__(self) -> None:
        self.hand = _Hand()
        self._streams: dict[str, list[mx.Stream]] = {}

    def streams(self, default: mx.Device) -> list[mx.Stream]:
        """One of the default device, preceded by one of the CPU, where files are read."""
        import mlx.core as mx

        if str(default) not in self._streams:
            kinds = [default] if default == mx.Device(mx.cpu) else [mx.Device(mx.cpu), default]
            self._streams[str(default)] = [mx.new_thread_unsafe_stream(kind) for kind in kinds]
        return self._streams[str(default)]


class _Hand:
    """A daemon thread that does what other threads ask for, started when it is first needed."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Lock]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T]) -> T:
        """What `work()` returns or raises, in this hand's thread. One caller at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mlx-spec device", daemon=True)
            self._thread.start()
        answer: list[Any] = []
        gate = threading.Lock()
        gate.acquire()
        self._jobs.put((work, answer, gate))
        interrupt: BaseException | None = None
        while True:
            try:
                gate.acquire()
                break
            except BaseException as exc:  # Ctrl-C: what is being done cannot be left half done
                interrupt = exc
        if interrupt is not None:
            raise interrupt
        value, error = answer
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _serve(self) -> None:
        while True:
            work, answer, gate = self._jobs.get()
            try:
                answer += [work(), None]
            except BaseException as exc:  # handed over: `call` raises it in the thread that asked
                answer += [None, exc]
            del work
            gate.release()
            del answer, gate


# -- one process ------------------------------------------------------------------------------------------

_guard = threading.Lock()
_devices: weakref.WeakSet[Device] = weakref.WeakSet()
_free: list[_Means] = []


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


_homeless = "mlx.core" in sys.modules and not _is_main()  # another thread than the main one has imported MLX
_leaving = False  # the process exits


@contextmanager
def importing() -> Iterator[None]:
    """Around what may be the first import of MLX: at exit it clears up for the thread that imported it."""
    global _homeless
    known = "mlx.core" in sys.modules
    yield
    if not known and "mlx.core" in sys.modules and not _is_main():
        _homeless = True


def _take_means(device: Device) -> _Means:
    with _guard:
        means = _free.pop() if _free else _Means()
        _devices.add(device)
    weakref.finalize(device, _free.append, means).atexit = False
    return means


_kept: list[Claim] = []  # turns that the end of the process keeps


def _before_exit() -> None:
    """Let no other thread be inside MLX when the interpreter goes down, and let none get in."""
    global _leaving
    _leaving = True
    for device in list(_devices):
        turn = device._turns.claim()
        _kept.append(turn)
        if not turn.take(wait=EXIT_WAIT):
            log.warning("a thread is still at work after %g s; the process exits without waiting for it", EXIT_WAIT)


atexit.register(_before_exit)
