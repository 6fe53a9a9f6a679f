"""Runs a command with a real NFS server and the kernel's own NFS client, inside User-Mode Linux.

    python -m tools.nfs [--version 3] python -m benchmarks.crash --kills 200 --cache /mnt/a

User-Mode Linux is a kernel that runs as an ordinary program, without root or special hardware. It sees the files of
this host read-only and starts NFS-Ganesha, a user-space server, on an in-memory file system. `/mnt/a` and `/mnt/b` are
mounts of it with separate caches, like two hosts. NFS 3 is the harder test: its server doesn't track open files, so a
file that one host deletes vanishes for a reader on the other, whereas an NFS 4.1 server may keep it. On Debian, run
`apt install user-mode-linux nfs-ganesha-vfs rpcbind kmod`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
MOUNTS = (Path("/mnt/a"), Path("/mnt/b"))
PROGRAMS = {
    "linux.uml": "user-mode-linux",
    "ganesha.nfsd": "nfs-ganesha-vfs",
    "rpcbind": "rpcbind",
    "modprobe": "kmod",
    "ip": "iproute2",
}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

SERVER = """
NFS_CORE_PARAM { Protocols = 3, 4; MNT_Port = 20048; Enable_NLM = false; Enable_RQUOTA = false; }
NFSv4 {
  Graceless = true; RecoveryBackend = fs; RecoveryRoot = /run/recovery; Only_Numeric_Owners = true; Lease_Lifetime = 10;
}
EXPORT {
  Export_Id = 1; Path = /run/export; Pseudo = /run/export; Access_Type = RW; Squash = No_Root_Squash; SecType = sys;
  Transports = TCP; FSAL { Name = VFS; }
}
"""

START = """#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for folder in /run /mnt; do mount -t tmpfs memory $folder; done
mkdir -p /dev/shm /run/base/lib /run/export /run/recovery /mnt/a /mnt/b /mnt/host
mount -t tmpfs memory /dev/shm; mount -t hostfs -o {folder} host /mnt/host; ip link set lo up
ln -s /usr/lib/uml/modules /run/base/lib/modules
for module in nfsv3 nfsv4; do modprobe -d /run/base $module; done
mkdir -p /run/rpcbind; rpcbind
ganesha.nfsd -f /mnt/host/ganesha.conf -L /mnt/host/ganesha.log -p /run/ganesha.pid
for try in 1 2 3 4 5 6 7 8 9 10; do
  mount -i -t nfs -o {options} 127.0.0.1:/run/export /mnt/a && break
  sleep 0.5
done
mount -i -t nfs -o {options} 127.0.0.1:/run/export /mnt/b &&
  {{ cd {root}; {command}; echo $? > /mnt/host/code; }} > /mnt/host/output 2>&1
sync; echo o > /proc/sysrq-trigger; sleep 10
"""
COMMON = "addr=127.0.0.1,proto=tcp,port=2049,nosharecache"
OPTIONS = {
    "3": f"vers=3,{COMMON},mountproto=tcp,mountport=20048,nolock",
    "4.1": f"vers=4.1,{COMMON},clientaddr=127.0.0.1",
}


class CommandResult(NamedTuple):
    """The result of a command; `code` is None if the machine failed to run it, or it timed out."""

    code: int | None
    output: str
    too_long: bool = False


def missing() -> str | None:
    """Why the machine can't be started, or None if it can."""
    absent = [package for program, package in PROGRAMS.items() if shutil.which(program, path=PATH) is None]
    return f"needs Debian's {' '.join(absent)}" if absent else None


def run(command: list[str], *, timeout: float, version: str = "3", memory: str = "2G") -> CommandResult:
    """Runs a command in a new machine."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-nfs-"))
    try:
        (folder / "ganesha.conf").write_text(SERVER)
        filled = START.format(folder=folder, root=ROOT, command=shlex.join(command), options=OPTIONS[version])
        (folder / "start").write_text(filled)
        (folder / "start").chmod(0o755)
        variables = [f"PATH={PATH}", f"PYTHONPATH={ROOT}", "HOME=/run", "TMPDIR=/dev/shm", "PYTHONUNBUFFERED=1"]
        machine = ["linux.uml", f"mem={memory}", "rootfstype=hostfs", "rootflags=/", "ro", "quiet", *variables]
        consoles = ["con=null", "con0=null,fd:1", f"init={folder}/start"]
        with (folder / "console").open("wb") as console:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": console}
            started = subprocess.Popen([*machine, *consoles], start_new_session=True, **streams)
            too_long = _finish(started, timeout)
        code, output = folder / "code", folder / "output"
        if not output.exists() or not code.exists():
            logs = [path for path in (folder / "console", folder / "ganesha.log", output) if path.exists()]
            return CommandResult(None, "\n".join(path.read_text(errors="replace")[-3000:] for path in logs), too_long)
        return CommandResult(int(code.read_text()), output.read_text(errors="replace"))
    finally:
        shutil.rmtree(folder)


def _finish(machine: subprocess.Popen[bytes], timeout: float) -> bool:
    """Waits for the machine to end; returns whether it timed out."""
    try:
        machine.wait(timeout)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:  # the machine's processes are in its process group
        if machine.poll() is None:
            os.killpg(machine.pid, signal.SIGKILL)
        machine.wait()


def main() -> None:
    """Runs the given command; `python` is replaced by this interpreter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=OPTIONS, default="3")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    why = missing()
    if why is not None:
        sys.exit(f"NFS is not available: {why}")
    command = [sys.executable if word == "python" else word for word in args.command]
    done = run(command, timeout=24 * 3600, version=args.version)
    print(done.output)
    sys.exit(1 if done.code is None else done.code)


if __name__ == "__main__":
    main()
