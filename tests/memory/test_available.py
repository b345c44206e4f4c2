"""Of all the limits that hold on a machine the least counts, and odd files do no harm.

The machines are trees of files as the Linux kernel shows them.
"""

import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from curvax import available_memory
from curvax.memory import budget
from curvax.memory.budget import _of_host

MB = 10**6
SYSTEM = 64 * 1024 * 10**6
MEMINFO = (
    f"MemTotal: {2 * SYSTEM // 1024} kB\nMemAvailable:   {SYSTEM // 1024} kB\nSwapFree: 1 kB\n"
)


@pytest.fixture(autouse=True)
def no_limit_of_our_own(monkeypatch):
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (unlimited, unlimited))


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


@pytest.fixture
def host(tmp_path):
    """What is available on a machine with these files, besides plenty of system memory."""

    def measure(files, meminfo=MEMINFO):
        write(tmp_path, {"proc/meminfo": meminfo} | files)
        return _of_host(tmp_path)

    return measure


def group(folder, limit, used, stat=""):
    """A control group of version 2."""
    files = {"memory.max": limit, "memory.current": used, "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}/{name}": f"{text}\n" for name, text in files.items()}


def old_group(folder, limit, used, stat=""):
    """A control group of version 1."""
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"
    files = zip(names, (limit, used, stat), strict=True)
    return {f"sys/fs/cgroup/memory/{folder}/{name}": f"{text}\n" for name, text in files}


def member_of(path):
    return {"proc/self/cgroup": f"0::{path}\n"}


OLD = {"proc/self/cgroup": "12:cpu,cpuacct:/job\n7:hugetlb,memory:/job/step\n1:name=systemd:/x\n"}
UNLIMITED = 9223372036854771712  # What version 1 says for no limit.


def test_without_groups_it_is_what_the_system_has(host):
    assert host({}) == SYSTEM


class TestGroups:
    def test_limit_minus_use(self, host):
        assert host(member_of("/job") | group("job", 500 * MB, 100 * MB)) == 400 * MB

    def test_the_limit_may_be_that_of_a_group_above(self, host):
        files = member_of("/a/b/c") | group("a/b/c", "max", 10 * MB)
        files |= group("a/b", 800 * MB, 300 * MB) | group("a", 600 * MB, 400 * MB)
        assert host(files) == 200 * MB

    def test_no_limit_is_none(self, host):
        assert host(member_of("/job") | group("job", "max", 100 * MB)) == SYSTEM

    def test_a_limit_above_what_the_system_has_does_not_matter(self, host):
        assert host(member_of("/job") | group("job", 10 * SYSTEM, 0)) == SYSTEM

    def test_cached_files_can_be_had(self, host):
        stat = f"anon 5\ninactive_anon 7\ninactive_file {30 * MB}\nactive_file 11"
        assert host(member_of("/job") | group("job", 500 * MB, 100 * MB, stat)) == 430 * MB

    def test_a_full_group_has_nothing_left(self, host):
        assert host(member_of("/job") | group("job", 100 * MB, 120 * MB)) == 0

    @pytest.mark.parametrize(
        "path", ["/", "/kubepods/pod1/abc", "/../../outside", "/gone (deleted)"]
    )
    def test_a_container_sees_its_own_group_at_the_root(self, host, path):
        assert host(member_of(path) | group(".", 300 * MB, 100 * MB)) == 200 * MB

    def test_a_path_with_colons(self, host):
        files = member_of("/a:b/c::d") | group("a:b/c::d", 300 * MB, 100 * MB)
        assert host(files) == 200 * MB


class TestGroupsOfVersion1:
    def test_limit_minus_use(self, host):
        assert host(OLD | old_group("job/step", 500 * MB, 100 * MB)) == 400 * MB

    def test_the_limit_may_be_that_of_a_group_above(self, host):
        files = OLD | old_group("job/step", UNLIMITED, 50 * MB) | old_group("job", 90 * MB, 60 * MB)
        assert host(files) == 30 * MB

    def test_no_limit_is_none(self, host):
        assert host(OLD | old_group("job/step", UNLIMITED, 50 * MB)) == SYSTEM

    def test_cached_files_of_the_groups_below_can_be_had(self, host):
        stat = f"inactive_file 5\ntotal_inactive_file {7 * MB}"
        assert host(OLD | old_group("job/step", 500 * MB, 100 * MB, stat)) == 407 * MB

    def test_a_container_sees_its_own_group_at_the_root(self, host):
        assert host(OLD | old_group(".", 300 * MB, 100 * MB)) == 200 * MB

    def test_both_versions_at_once(self, host):
        both = {"proc/self/cgroup": OLD["proc/self/cgroup"] + "0::/user\n"}
        assert host(both | old_group("job/step", 500 * MB, 0)) == 500 * MB


class TestOddFiles:
    @pytest.mark.parametrize(
        "lines",
        ["", "\n\n", "nonsense", "0:", "0::", ":::", "x::/job", "0:memory", "\x00\x01", "0::\n\n:"],
    )
    def test_lines_that_name_no_group(self, host, lines):
        assert host({"proc/self/cgroup": lines}) == SYSTEM

    def test_lines_next_to_a_group(self, host):
        lines = {"proc/self/cgroup": "\nnonsense\n0::/job\n:\n"}
        assert host(lines | group("job", 500 * MB, 100 * MB)) == 400 * MB

    @pytest.mark.parametrize("limit", ["", "many", "-1", "1.5", "²"])
    def test_limits_that_are_no_numbers(self, host, limit):
        assert host(member_of("/job") | group("job", limit, 100 * MB)) == SYSTEM
        assert host(member_of("/job") | group("job", 500 * MB, limit)) == SYSTEM

    @pytest.mark.parametrize(
        "stat", ["", "\n\n", "inactive_file", "inactive_file x", "inactive_file -3", "  \n\n a b c"]
    )
    def test_statistics_that_say_nothing(self, host, stat):
        assert host(member_of("/job") | group("job", 500 * MB, 100 * MB, stat)) == 400 * MB

    def test_files_that_are_not_text(self, host, tmp_path):
        write(tmp_path, member_of("/job") | group("job", 500 * MB, 100 * MB))
        (tmp_path / "sys/fs/cgroup/job/memory.stat").write_bytes(b"\xff\xfe\x80")
        assert host({}) == 400 * MB

    @pytest.mark.parametrize(
        "meminfo", ["", "MemFree: 5 kB", "MemAvailable:", "MemAvailable: x kB"]
    )
    def test_a_system_that_does_not_tell_has_all_of_its_memory(self, host, meminfo, monkeypatch):
        pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
        monkeypatch.setattr(budget.os, "sysconf", pages.__getitem__)
        assert host({}, meminfo) == 4_096_000

    def test_a_system_that_reports_nothing_at_all(self, host, monkeypatch):
        def unknown(name):
            raise ValueError(name)

        monkeypatch.setattr(budget.os, "sysconf", unknown)
        with pytest.raises(NotImplementedError, match=r"^curvax\.available_memory: .* in bytes"):
            host({}, "")


class TestAddressSpace:
    def test_limit_minus_what_is_mapped(self, host, monkeypatch):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (900 * MB, 900 * MB))
        pages = 100
        left = 900 * MB - pages * resource.getpagesize()
        assert host({"proc/self/statm": f"{pages} 50 20 1 0 30 0\n"}) == left

    @pytest.mark.parametrize("statm", ["", "what 1 2"])
    def test_unknown_use_is_no_limit(self, host, monkeypatch, statm):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (900 * MB, 900 * MB))
        assert host({"proc/self/statm": statm}) == SYSTEM

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
    def test_a_process_with_a_limit_has_less(self):
        code = (
            "import resource; from pathlib import Path\n"
            "from curvax.memory.budget import _of_address_space, _of_host\n"
            "before = _of_host(Path('/'))\n"
            "size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (size + 50_000_000, resource.RLIM_INFINITY))\n"
            "[left] = _of_address_space(Path('/'))\n"
            "assert 10_000_000 < left <= 50_000_000, left\n"
            "assert _of_host(Path('/')) <= 50_000_000\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr


class TestDevices:
    def device(self, stats):
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    def test_an_accelerator_has_its_limit_minus_what_is_in_use(self):
        stats = {"bytes_limit": 16_000, "bytes_in_use": 6_000, "peak_bytes_in_use": 9_000}
        assert available_memory(self.device(stats)) == 10_000

    def test_an_accelerator_that_is_full(self):
        assert available_memory(self.device({"bytes_limit": 5, "bytes_in_use": 6})) == 0

    @pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
    def test_an_accelerator_that_does_not_tell(self, stats):
        words = r"^curvax\.available_memory: .* does not report .* Give the budget in bytes"
        with pytest.raises(NotImplementedError, match=words):
            available_memory(self.device(stats))

    def test_a_cpu_is_the_machine(self, monkeypatch):
        monkeypatch.setattr(budget, "_of_host", lambda root: 1234 if root == Path("/") else 0)
        assert available_memory(jax.devices("cpu")[0]) == 1234
        assert available_memory() == 1234


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_this_machine_has_some():
    total = budget.os.sysconf("SC_PHYS_PAGES") * budget.os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() <= total
