"""Which GPU and which network interface are a rank's own, told without either."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

import launcher.guard.agreement as agreement
import launcher.training.start as start
import parallel.preflight.network as network
import parallel.processes.device as device
from launcher.errors import UserError
from launcher.training.heap import ALLOCATORS, let_segments_grow
from parallel.checkpoint.saver import Saver
from parallel.mesh import lone_mesh
from parallel.preflight.device import open_device
from parallel.processes.device import Held, choose_interface, device_problems, held_device, own_device
from parallel.processes.roll_call import RollCallError
from parallel.processes.start import fork_server


def gpus(patch: pytest.MonkeyPatch, n_devices: int, local_rank: int) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: n_devices)
    patch.setattr(torch.cuda, "get_device_properties", lambda each: type("Properties", (), {"uuid": f"u{each.index}"}))
    patch.setenv("LOCAL_RANK", str(local_rank))


@pytest.mark.parametrize(("n_devices", "local_rank", "index"), [(8, 3, 3), (1, 0, 0), (1, 3, 0)])
def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch, n_devices, local_rank, index):
    """Slurm's --gpus-per-task shows each task its own alone, as device 0."""
    gpus(monkeypatch, n_devices, local_rank)
    assert own_device() == torch.device("cuda", index)
    assert held_device()["gpu"] == f"u{index}"


def test_a_rank_without_a_gpu_says_so(monkeypatch):
    gpus(monkeypatch, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (line,) = device_problems([held_device()])
    host = held_device()["host"]
    assert line == (
        f"LOCAL_RANK on rank 0 ({host}) must number a GPU that the rank sees, and is 3 of 2 "
        "(CUDA_VISIBLE_DEVICES='4,5'); start one rank for each GPU"
    )


def test_two_ranks_on_one_gpu_are_named():
    held = [Held(host=host, gpu=gpu, problem="") for host, gpu in (("a", "u0"), ("a", "u0"), ("b", "u0"), ("a", "u1"))]
    (line,) = device_problems(held)
    assert line == (
        "ranks 0, 1 (a) must each have a GPU of their own, and share u0; start one rank for each GPU "
        "(or set CUDA_VISIBLE_DEVICES= to train on the CPU)"
    )
    assert device_problems([Held(host="a", gpu="", problem="")] * 3) == []  # CPUs


@pytest.fixture
def without_cuda(monkeypatch) -> pytest.MonkeyPatch:
    """A task to which Slurm has given two GPUs, of which torch, a build for the CPU, sees none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return monkeypatch


def test_gpus_that_slurm_has_given_are_not_left_idle(without_cuda):
    """The run would have trained on the CPU, hundreds of times slower, without a word."""
    host, why = held_device()["host"], "none of GPUs 0,1 that Slurm has given it, since torch"
    (line,) = device_problems([held_device()] * 16)
    assert line.startswith(f"rank 0 ({host}) and 15 more must see a GPU, and sees {why} {torch.__version__} is a ")
    with pytest.raises(RuntimeError, match=f"^torch sees {why}"):
        open_device()


def test_a_driver_that_is_too_old_is_told_in_its_own_words(without_cuda):
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020)")

    without_cuda.setattr(torch.backends.cuda, "is_built", lambda: True)
    without_cuda.setattr(torch.cuda, "init", refuse)
    (line,) = device_problems([held_device()])
    assert "given it: The NVIDIA driver on your system is too old (found version 12020); install a torch" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1"), ("SLURM_STEP_GPUS", "NoDevFiles")],
)
def test_a_cpu_may_be_asked_for(without_cuda, name, value):
    without_cuda.setenv(name, value)
    assert device_problems([held_device()] * 2) == []
    assert open_device() == torch.device("cpu")


def test_a_rank_that_sees_no_gpu_though_others_do_is_named():
    held = [Held(host=host, gpu=gpu, problem="") for host, gpu in (("a", "u0"), ("b", ""), ("b", ""))]
    (line,) = device_problems(held)
    assert line.startswith("rank 1 (b) and 1 more must see a GPU, and sees none, though others do; ")


def test_more_local_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"^--ranks=3 must be at most 2, this machine's GPUs; try 2, or CUDA_VISIBLE"):
        start.check_gpus(3)
    start.check_gpus(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    start.check_gpus(3)


def test_deepspeed_is_given_the_device_for_the_local_rank(monkeypatch):
    """It makes ``cuda:LOCAL_RANK``, which a rank that sees its own GPU alone does not have."""
    import parallel.zero.patches as patches

    seen = []
    gpus(monkeypatch, 1, 3)
    patches.in_place_of_local_rank(lambda **options: seen.append(os.environ["LOCAL_RANK"]))()
    assert (seen, os.environ["LOCAL_RANK"]) == (["0"], "3")


def test_zero_3_cuts_weights_on_the_device_that_the_rank_sees(monkeypatch):
    """What cuts weights makes ``cuda:LOCAL_RANK`` the process's device too, before DeepSpeed's engine is made."""
    import deepspeed

    import parallel.zero.patches as patches
    from parallel.zero.zero3 import Zero3

    seen = []
    gpus(monkeypatch, 1, 3)
    monkeypatch.setattr(deepspeed.zero, "Init", lambda **options: seen.append((os.environ["LOCAL_RANK"], *options)))
    way: Any = Zero3.__new__(Zero3)
    way.mesh, way.patches, way.config, way.dtype = lone_mesh(torch.device("cpu")), patches, {}, torch.bfloat16
    assert way.partition is None
    assert seen == [("0", "data_parallel_group", "config_dict_or_path", "dtype")]
    assert os.environ["LOCAL_RANK"] == "3"


def test_gpus_may_be_named_by_their_uuids(monkeypatch):
    """ZeRO 1 and 2 ask how much memory is free: DeepSpeed by pynvml, with a number out of CUDA_VISIBLE_DEVICES."""
    import deepspeed.accelerator.cuda_accelerator as of_deepspeed
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    import parallel.zero.patches as patches

    assert "available_memory" in DeepSpeedZeroOptimizer.__init__.__code__.co_names
    gpus = patches.in_place_of(of_deepspeed.CUDA_Accelerator())
    monkeypatch.setattr(of_deepspeed, "pynvml", object())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 if device is None else device, 9))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1")
    assert (gpus.available_memory(), gpus.available_memory(1)) == (3, 1)


class PlainStream(NamedTuple):
    """A device's default stream, or another one; what is done on it is done at once."""

    device: torch.device

    def wait_event(self, event: None) -> None:
        """Nothing to wait for."""


def test_the_checkpoint_writer_leaves_other_ranks_gpus_alone(monkeypatch):
    """By torch's own context of a stream, which goes back to where its thread was: to cudaSetDevice, which opens."""
    own, first, thread, opened = torch.device("cuda", 3), torch.device("cuda", 0), threading.local(), []

    def enter(device: torch.device) -> None:
        if device != getattr(thread, "device", first):
            opened.append(device)
        thread.device = device

    monkeypatch.setattr(torch.cuda, "_get_device_index", lambda *_: getattr(thread, "device", first).index)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: PlainStream(device or getattr(thread, "device", first))
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())  # leaves for a device that is open only
    monkeypatch.setattr(torch.cuda, "set_device", enter)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: enter(stream.device))
    saver: Any = Saver.__new__(Saver)
    saver.stream, saver.mesh, saver.copied = PlainStream(own), lone_mesh(own), threading.Event()
    copied = torch.zeros(4)
    writer = threading.Thread(target=saver._copy, args=([torch.arange(4.0)], copied, None))
    writer.start()
    writer.join()
    assert copied.tolist() == [0, 1, 2, 3] and saver.copied.is_set()
    assert opened == [own]


@pytest.mark.parametrize(
    ("name", "settings"), [(None, "expandable_segments:True"), *((name, "backend:native") for name in ALLOCATORS)]
)
def test_what_is_set_of_the_allocator_counts(name, settings):
    """torch's own word: it reads the first of two variables, of which the second is the one that it documents."""
    environment = {} if name is None else {name: settings}
    let_segments_grow(environment)
    assert list(environment.values()) == [settings]
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip(f"torch {torch.__version__} does not say how its allocator is set; 2.12 and later do")
    clean = {key: value for key, value in os.environ.items() if key not in ALLOCATORS}
    ask = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    done = subprocess.run([sys.executable, "-c", ask], env=clean | environment, capture_output=True, text=True)
    assert done.stdout.strip() == settings, done.stderr


def test_gpus_are_counted_without_starting_cuda_in_the_fork_server(monkeypatch):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    fork_server()
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


ROUTES = {"10.0.0.1": "10.0.0.7", "127.0.1.1": "127.0.1.1", device.ELSEWHERE: "192.168.1.7", "10.0.0.7": "10.0.0.7"}
NAMES = {"10.0.0.7": "ib0", "127.0.1.1": "lo", "192.168.1.7": "eth0"}


@pytest.mark.parametrize(
    ("master", "chosen"),
    [("10.0.0.1", "ib0"), ("10.0.0.7", "ib0"), ("127.0.1.1", "eth0"), ("10.99.0.1", "eth0")],
    ids=["another node", "this node", "this node by its name on Debian", "no route"],
)
def test_gloo_takes_the_interface_that_reaches_rank_0(monkeypatch, master, chosen):
    monkeypatch.setattr(device, "interface_of", NAMES.get)
    monkeypatch.setattr(device, "is_loopback", lambda name: name == "lo")
    environment = {"MASTER_ADDR": master, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    choose_interface(environment, ROUTES.get)
    assert environment["GLOO_SOCKET_IFNAME"] == chosen


def test_an_interface_that_was_chosen_stays():
    environment = {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "bond0"}
    choose_interface(environment, ROUTES.get)
    assert environment["GLOO_SOCKET_IFNAME"] == "bond0"


@pytest.mark.parametrize(
    ("given", "taken"), [("ib", "ib0"), ("ib1", "ib1"), ("en", "eno2"), ("hsn", "hsn"), ("ib0,ib1", "ib0,ib1")]
)
def test_the_beginning_of_a_name_which_nccl_takes_is_made_whole_for_gloo(monkeypatch, given, taken):
    """slurm.network_interface=ib is told to both; gloo found no interface of that name, and the job failed."""
    link, internet = ([type("Address", (), {"family": each})] for each in (socket.AF_PACKET, socket.AF_INET))
    names = {"lo": internet, "eno1": link, "eno2": internet, "ib1": internet, "ib0": internet}
    monkeypatch.setattr(device.psutil, "net_if_addrs", lambda: names)
    environment = {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": given}
    choose_interface(environment, ROUTES.get)
    assert environment["GLOO_SOCKET_IFNAME"] == taken


def test_a_preflight_meets_on_the_interface_that_training_would_take(monkeypatch):
    """Else nodes whose own names lead to 127.0.1.1 could not work with each other there, and all were broken."""
    calls = []
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "")
    monkeypatch.setattr(network, "choose_interface", lambda: calls.append("interface"))
    monkeypatch.setattr(network.dist, "init_process_group", lambda *arguments, **options: calls.append("group"))
    monkeypatch.setattr(network.dist, "destroy_process_group", lambda: calls.append("end"))
    with network._group(torch.distributed.HashStore(), "pair", [0], 0, torch.device("cpu"), 1.0):
        assert calls == ["interface", "group"]


def test_one_machine_needs_no_interface():
    environment = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    choose_interface(environment)
    assert "GLOO_SOCKET_IFNAME" not in environment


def test_this_machines_own_interfaces_are_told():
    """The real functions: what routes to the loopback address leaves by the loopback interface."""
    source = device.source_address("127.0.0.1")
    assert source is not None
    name = device.interface_of(source)
    assert name is not None and device.is_loopback(name)
    assert device.interface_of("203.0.113.1") is None


def test_a_jobs_rank_sets_its_allocator_before_it_looks_at_its_gpu(monkeypatch, tmp_path):
    """By the roll call, before the loop: torch's allocator reads its settings once, as CUDA is started."""
    for name in ALLOCATORS:
        monkeypatch.setenv(name, "")  # so that what the start sets is undone
        monkeypatch.delenv(name)
    checks = ("end_with_job", "check_ranks", "check_limits", "check_start", "check_prepared", "check_tokens")
    for name in (*checks, "check_evaluated_tasks", "set_rank_environment", "load_checked", "with_source"):
        monkeypatch.setattr(start, name, lambda *_, **__: None)
    found = []

    def agree(_: Any) -> None:
        found.append(os.environ.get(ALLOCATORS[0]))
        raise RollCallError(["nobody is here"], is_disagreement=True)

    monkeypatch.setattr(agreement, "agree", agree)
    with pytest.raises(UserError):
        start.join_job(tmp_path, [], None, 2)
    assert found == ["expandable_segments:True"]
