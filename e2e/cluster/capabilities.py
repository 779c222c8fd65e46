"""Which Linux capabilities this process can never have, and so cannot grant to a container."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
"""By bit number: capability.h of Linux."""


def lacking(status: str | None = None) -> list[str]:
    """CAP_ names outside the bounding set of /proc/self/status."""
    text = Path("/proc/self/status").read_text() if status is None else status
    bounding = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("CapBnd:"))
    return [f"CAP_{name}" for bit, name in enumerate(NAMES) if not bounding >> bit & 1]
