"""The test guest against QEMU's own storage daemon, so that a fault that it finds with Millrace is Millrace's."""

import guest


def image(path, mib=128):
    with open(path, "wb") as file:
        file.truncate(mib << 20)
    return path


def test_a_guest_checks_its_disk_over_pauses_and_a_reset(tmp_path):
    path = tmp_path / "disk.sock"
    with (
        guest.StorageDaemon(path, image(tmp_path / "disk.img"), queues=2),
        guest.Guest(tmp_path / "vm", path, queues=2, processors=2, mode="load", secs=2, mib=16) as vm,
    ):
        vm.wait_for(r"GUEST LOAD workers=8 blocks=4096")
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        vm.stop()
        assert vm.status() == "paused"
        vm.cont()
        vm.reset()
        vm.wait_for(r"GUEST LOAD workers", times=2)
        vm.wait_for(r"GUEST LOAD OK")
        checked = vm.wait_for(r"GUEST CHECKED ops=(\d+) swept=(\d+) slowest_ms=(\d+)")
        assert int(checked[1]) > 100 and int(checked[2]) > 50
        vm.wait_for_end()


def test_files_are_readable_after_a_remount(tmp_path):
    path = tmp_path / "disk.sock"
    with (
        guest.StorageDaemon(path, image(tmp_path / "disk.img")),
        guest.Guest(tmp_path / "vm", path, mode="files") as vm,
    ):
        vm.wait_for(r"GUEST FILES OK")
        vm.wait_for_end()
