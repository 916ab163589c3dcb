"""parallel/zero/ is the one room that knows DeepSpeed: its private names are used there only, and all of them exist.

That what we patch is what DeepSpeed calls is seen by tests/multiprocess/test_deepspeed_room.py.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import parallel.zero.ways  # and with it all that it chooses from
from parallel.zero.sharding import Sharding

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "parallel" / "zero"
PARTS = ("launcher", "modeling", "parallel", "data", "benchmarks")
HOUSE = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
OUTSIDE = [path for path in HOUSE if ROOM not in path.parents]
PEER = ROOT / "benchmarks/zero_step_speed.py"  # whose peer, `transformers`' class, goes through DeepSpeed by itself

# What the room takes from DeepSpeed's objects, by the file that has to define it.
TAKEN = {
    "runtime/engine.py": """enable_backward_allreduce set_gradient_accumulation_boundary allreduce_gradients
        coalesce_grad_reduction has_moe_layers optimizer step zero_grad""",
    "runtime/zero/stage_1_and_2.py": """_fill_param_grad_accum_attribute grad_accum params_in_partition
        averaged_gradients bit16_groups single_partition_of_fp32_groups update_lp_params clear_backward_seen_flag
        overflow loss_scaler scaled_global_norm _update_scale create_gradient_handling_hooks check_overflow
        grad_position get_param_id _wait_for_offload_copies overlapping_partition_gradients_reduce_epilogue""",
    "runtime/zero/stage3.py": """fp16_groups averaged_gradients fp32_partitioned_groups_flat
        fp16_partitioned_groups_flat grad_position get_param_id persistent_parameters _partition_all_parameters
        _unflatten_partitioned_parameters clear_backward_seen_flag overflow loss_scaler _get_norm_groups
        _update_scale""",
    "runtime/zero/partition_parameters.py": "_convert_to_zero_parameters ds_numel ds_tensor all_gather",
    "runtime/zero/utils.py": "assert_ints_same_as_other_ranks",
    "runtime/bf16_optimizer.py": """bf16_groups fp32_groups_has_gradients fp32_groups_gradients
        fp32_groups_flat_partition fp32_groups_gradient_flat_partition update_lp_params clear_lp_grads update_hp_grads
        _update_hp_grad clear_hp_grads
        overflow _hp_grad see_memory_usage get_global_norm_of_tensors get_norm_with_moe_layers""",
    "runtime/fp16/loss_scaler.py": """cur_scale cur_iter last_overflow_iter cur_hysteresis min_scale update_scale""",
    "utils/tensor_fragment.py": "lp_fragment_address hp_fragment_address hp_fragment numel start",
    "utils/mixed_precision_linkage.py": "_hp_mapping",
    "utils/groups.py": """_EXPERT_PARALLEL_GROUP _EXPERT_DATA_PARALLEL_GROUP _EXPERT_PARALLEL_GROUP_RANKS
        _EXPERT_DATA_PARALLEL_GROUP_RANKS""",
    "ops/__init__.py": "__compatible_ops__",
}
# What the room puts on parameters, groups and objects because DeepSpeed looks for it, by a file that has to.
LOOKED_FOR = {
    "moe/utils.py": "allreduce moe",
    "runtime/zero/stage_1_and_2.py": "group_name name",
    "runtime/utils.py": "tensor_model_parallel",
    "runtime/zero/partition_parameters.py": "ds_zero_partition_process_group",
    "runtime/zero/partitioned_param_coordinator.py": "assert_ints_same_as_other_ranks",
    "runtime/zero/stage3.py": "ds_zero_partition_group_name ds_zero_placement_family",
    "runtime/engine.py": "set_deepspeed_parallelism num_experts get_model_parallel_rank",
    "utils/groups.py": """get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size
        get_model_parallel_world_size""",
    "runtime/base_optimizer.py": "get_tensor_model_parallel_world_size",
    "comm/torch.py": "__compatible_ops__ NAME",
    "op_builder/cpu/comm.py": "deepspeed_shm_comm",
}
# Names of other things too, which the house may use outside the room.
COMMON = """optimizer step zero_grad overflow loss_scaler numel start name moe all_gather allreduce group_name NAME
    num_experts check_overflow"""
PRIVATE = {name for names in (*TAKEN.values(), *LOOKED_FOR.values()) for name in names.split()} - set(COMMON.split())
# The expressions in the room that end so are DeepSpeed's objects.
OBJECTS = {"optimizer", "deepspeed", "engine", "scaler", "partition", "mapping", "low", "high", "bf16_optimizer"}
OF_MODULES = {"accelerator", "initialize", "moe", "ops", "runtime", "utils", "zero"}  # public, below deepspeed itself


def deepspeed_file(name: str) -> Path:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    return folder / name if (folder / name).exists() else folder / "ops" / name


@cache
def words(path: Path, *, defined: bool) -> set[str]:
    """The names that a file defines (functions, classes, imports, assigned names and attributes), or uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
            case ast.Attribute(attr=name, ctx=context) | ast.Name(id=name, ctx=context):
                if not defined or isinstance(context, ast.Store):
                    found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Constant(value=str(text)) if text.isidentifier():
                found.add(text)  # setattr, getattr and keys of groups
    return found


@pytest.mark.parametrize("file", TAKEN)
def test_deepspeed_defines_what_the_room_takes(file):
    assert set(TAKEN[file].split()) - words(deepspeed_file(file), defined=True) == set()


@pytest.mark.parametrize("file", LOOKED_FOR)
def test_deepspeed_looks_for_what_the_room_sets(file):
    assert set(LOOKED_FOR[file].split()) - words(deepspeed_file(file), defined=False) == set()


def test_planted_a_name_that_deepspeed_has_not_is_seen():
    assert "averaged_gradient" not in words(deepspeed_file("runtime/zero/stage_1_and_2.py"), defined=True)


def unlisted(path: Path) -> set[str]:
    """What a file takes from DeepSpeed's objects and no table above names."""
    listed = {name for names in TAKEN.values() for name in names.split()} | OF_MODULES
    listed |= {"given_norm", "is_norm_taken", "accumulation", "averaged_over"}  # our subclasses' own
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            base = node.value
            end = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            if end in OBJECTS and node.attr not in listed:
                found.add(f"{end}.{node.attr}")
    return found


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_the_tables_name_all_that_the_room_takes(path):
    assert unlisted(path) == set()


def test_planted_a_name_that_no_table_has_is_seen(tmp_path):
    path = tmp_path / "more.py"
    path.write_text("def f(self):\n    return self.optimizer.bit16_groups_flat\n")
    assert unlisted(path) == {"optimizer.bit16_groups_flat"}


def hidden(ways: Iterable[type]) -> list[str]:
    """What the base of all ways sets, and a way computes by a property of that name: it never would."""
    tree = ast.parse(inspect.getsource(Sharding))
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return [
        f"{way.__name__}.{name}"
        for way in ways
        for name in sorted(stored)
        if isinstance(inspect.getattr_static(way, name, None), property | cached_property)
    ]


def test_no_way_has_a_property_that_its_base_sets():
    """ZeRO 2 and 3 under a pipeline once asked a namesake for their sums."""
    assert {*all_ways()} >= {parallel.zero.ways.Zero2, parallel.zero.ways.Zero3}
    assert hidden(all_ways()) == []


def test_planted_a_property_that_the_base_sets_is_seen():
    class Way(Sharding):
        @cached_property
        def mesh(self):
            return None

    assert hidden([Way]) == ["Way.mesh"]


def all_ways() -> Iterator[type]:
    """Sharding's subclasses, and theirs."""
    left = [Sharding]
    while left:
        left += (found := left.pop().__subclasses__())
        yield from (way for way in found if way.__module__.startswith("parallel."))  # not those of tests


def leaks(path: Path) -> list[str]:
    """DeepSpeed's private names and its modules, where they must not be."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in PRIVATE:
                found.append(name)
            case ast.Constant(value=str(text)) if text in PRIVATE or text.startswith("deepspeed."):
                found.append(text)
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] == "deepspeed"]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "deepspeed":
                found.append(module)
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_of_deepspeed_is_used_outside_the_room(path):
    assert leaks(path) == (["deepspeed"] if path == PEER else [])


@pytest.mark.parametrize(
    ("line", "leak"),
    [
        ("held = weight.ds_tensor", "ds_tensor"),
        ("held = getattr(weight, 'ds_tensor', weight)", "ds_tensor"),
        ("from deepspeed.utils import groups", "deepspeed.utils"),
        ("def f():\n    import deepspeed", "deepspeed"),
        ("load('deepspeed.runtime.engine')", "deepspeed.runtime.engine"),
        ("parts = engine.sharding.optimizer.averaged_gradients", "averaged_gradients"),
    ],
)
def test_planted_leak_is_seen(tmp_path, line, leak):
    path = tmp_path / "leaking.py"
    path.write_text(line + "\n")
    assert leaks(path) == [leak]


# Where a question about the ZeRO stage is one: what a config may combine, the choice of a class, closed forms of bytes.
ASKS_FOR_THE_STAGE = (
    "launcher/closed_form/",
    "launcher/config/",
    "launcher/plan/",
    "launcher/prove/matrix.py",
    "launcher/traffic/",
    "parallel/pipeline/rules.py",
    "parallel/zero/ways.py",
)


def branches(path: Path) -> list[int]:
    """Lines that decide by the ZeRO stage, or by the name of an object's class."""

    def is_asked(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(attr="zero") | ast.Name(id="zero"):
                return True
            case ast.Attribute(attr="__name__", value=ast.Call(func=ast.Name(id="type"))):
                return True
            case ast.Tuple(elts=elements):
                return any(map(is_asked, elements))
        return False

    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Compare():
                asked = [node.left, *node.comparators]
            case ast.Match(subject=subject):
                asked = [subject]
            case ast.If(test=test) | ast.IfExp(test=test):
                asked = [test]
            case _:
                asked = []
        if any(map(is_asked, asked)):
            lines.append(node.lineno)  # pyright: ignore[reportAttributeAccessIssue]
    return lines


@pytest.mark.parametrize(
    "path",
    [path for path in HOUSE if not path.relative_to(ROOT).as_posix().startswith(ASKS_FOR_THE_STAGE)],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_nobody_else_decides_by_the_stage(path):
    assert branches(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "if engine.zero == 3:\n    pass",
        "same = 1 < self.zero",
        "match self.zero:\n    case 0:\n        pass",
        "match zero, precision:\n    case 0, _:\n        pass",
        "match type(optimizer).__name__:\n    case 'BF16_Optimizer':\n        pass",
        "held = part if zero else whole",
    ],
)
def test_planted_branch_is_seen(tmp_path, line):
    path = tmp_path / "branching.py"
    path.write_text(line + "\n")
    assert branches(path) == [1]


def test_the_installed_deepspeed_is_in_the_range_that_was_read():
    """Private names are sure for one minor version only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (required,) = [Requirement(line) for line in project["dependencies"] if line.startswith("deepspeed")]
    assert importlib.metadata.version("deepspeed") in required.specifier
    assert not required.specifier.contains("0.20.0")
