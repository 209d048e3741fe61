"""DelayedNetwork: lets processes of this machine speak to each other over a network with latency.

Each has a network namespace of its own with a TUN device in it. What leaves by one device is read
here, kept for the delay, and written to the device that has the destination's address. Bandwidth is
the rate that is asked for, or what this process can copy: several hundred megabytes per second.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import math
import os
import selectors
import shutil
import struct
import subprocess
import sys
import time
from types import TracebackType

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 32768  # fewer, larger packets: what is modelled is latency, not packets
DESTINATION = slice(16, 20)  # of an IPv4 header


def why_not() -> str | None:
    """Says what is missing for such a network; None where nothing is."""
    if os.geteuid() != 0:
        return "a network with latency needs root"
    if shutil.which("ip") is None:
        return "a network with latency needs iproute2"
    if not os.path.exists("/dev/net/tun"):
        return "a network with latency needs /dev/net/tun"
    return None


class DelayedNetwork:
    """``size`` namespaces whose packets take ``seconds`` to each other, and leave each of them at
    ``rate`` bytes per second at most. A context manager: what it makes, it removes."""

    def __init__(self, size: int, seconds: float, rate: float = math.inf):
        tag = f"inf{os.getpid() % 100000}"
        self.names = [f"{tag}n{place}" for place in range(size)]
        self.devices = [f"{tag}t{place}" for place in range(size)]
        self.addresses = [f"10.178.{place // 250}.{place % 250 + 1}" for place in range(size)]
        self._seconds, self._rate = seconds, rate
        self._files: list[int] = []
        self._switch: subprocess.Popen | None = None

    def __enter__(self) -> DelayedNetwork:
        try:
            for name, device, address in zip(self.names, self.devices, self.addresses):
                _ip("netns", "add", name)
                self._files.append(file := os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
                fcntl.ioctl(
                    file, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI)
                )
                _ip("link", "set", device, "netns", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{address}/16", "dev", device)
                _ip("-n", name, "link", "set", device, "mtu", str(MTU), "up")
            # A process of its own: nobody else's work delays the packets further.
            command = [
                sys.executable,
                __file__,
                str(self._seconds),
                str(self._rate),
                ",".join(self.addresses),
                *map(str, self._files),
            ]
            self._switch = subprocess.Popen(command, pass_fds=self._files)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        for file in self._files:
            os.close(file)
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def start(
        self, place: int, command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen:
        """Starts ``command`` in the namespace at ``place``."""
        variables = os.environ | {"GLOO_SOCKET_IFNAME": self.devices[place]} | environment
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[place], *command],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def switch(seconds: float, rate: float, addresses: list[str], files: list[int]) -> None:
    """Moves packets between the devices ``files``, each ``seconds`` after it was sent, for ever.
    What a device sends leaves it one packet after the other."""
    device_of = {
        bytes(map(int, address.split("."))): file for address, file in zip(addresses, files)
    }
    underway: list[tuple[float, int, int, bytes]] = []  # a heap; the number keeps their order
    free = dict.fromkeys(files, 0.0)  # when a device's last packet has left
    numbers = itertools.count()
    selector = selectors.DefaultSelector()
    for file in files:
        selector.register(file, selectors.EVENT_READ)
    while True:
        wait = max(0.0, underway[0][0] - time.monotonic()) if underway else None
        for key, _ in selector.select(wait):
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(key.fd, MTU + 64)
                    if (to := device_of.get(packet[DESTINATION])) is not None:
                        left = max(time.monotonic(), free[key.fd]) + len(packet) / rate
                        free[key.fd] = left
                        heapq.heappush(underway, (left + seconds, next(numbers), to, packet))
        while underway and underway[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(underway)
            with contextlib.suppress(BlockingIOError):  # a full queue drops it, as a switch does
                os.write(to, packet)


if __name__ == "__main__":
    seconds, rate, addresses, *files = sys.argv[1:]
    switch(float(seconds), float(rate), addresses.split(","), [int(file) for file in files])
