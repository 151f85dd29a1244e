"""Machines: all-reduce by hand and against nccl-tests, profiles from YAML, and what is refused."""

import pytest
import yaml

from eyas.bench.hardware import PROFILES, AllReduce, Hardware, find_hardware
from eyas.core import UsageError

OWN = {
    "memory_gb": 24,
    "memory_gb_s": 1000,
    "tflops": {"bf16": 100, "fp8": 200},
    "all_reduce": {"ring": {"algorithm": "ring", "base_us": 5, "hop_us": 1, "gb_s": 10}},
}


@pytest.fixture
def written(tmp_path):
    def write(content):
        file = tmp_path / "box.yaml"
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return str(file)

    return write


@pytest.mark.parametrize(
    ("algorithm", "all_reduce", "gather"),
    [
        ("ring", 5 + 2 * 3 * 2 + 1.5 * 100, 5 + 3 * 2 + 0.75 * 100),  # 1 MB at 10 GB/s: 100 us
        ("one-shot", 5 + 3 * 2 + 3 * 100, 5 + 3 * 2 + 0.75 * 100),
    ],
)
def test_all_reduce_by_hand(algorithm, all_reduce, gather):
    way = AllReduce(algorithm, base_us=5, hop_us=2, gb_s=10)
    assert way.seconds(1e6, 4) == pytest.approx(all_reduce * 1e-6)
    assert way.gather_seconds(1e6, 4) == pytest.approx(gather * 1e-6)


@pytest.mark.parametrize(("gpus", "microseconds"), [(8, 24.1), (4, 13.5)])
def test_a_ring_over_pcie_is_near_what_nccl_tests_measured(gpus, microseconds):
    """1 KB on RTX PRO 6000 (github.com/voipmonitor/rtx6kpro); the latencies are NCCL's own, not taken from there."""
    predicted = PROFILES["rtx-pro-6000"].all_reduce_seconds(1024, gpus)
    assert predicted == pytest.approx(microseconds * 1e-6, rel=0.2)


def test_engines_choose_by_size_and_use_what_is_stock():
    nvlink = PROFILES["h100-sxm"]
    ways = nvlink.all_reduce
    assert nvlink.all_reduce_seconds(1e4, 8) == ways["one-shot"].seconds(1e4, 8) < ways["ring"].seconds(1e4, 8)
    assert nvlink.all_reduce_seconds(1e8, 8) == ways["ring"].seconds(1e8, 8) < ways["one-shot"].seconds(1e8, 8)
    pcie = PROFILES["rtx-pro-6000"]
    assert pcie.all_reduce_seconds(1e4, 8) == pcie.all_reduce["ring"].seconds(1e4, 8)
    assert pcie.only("one-shot").all_reduce_seconds(1e4, 8) == pcie.all_reduce["one-shot"].seconds(1e4, 8)
    assert pcie.all_reduce_seconds(1e9, 1) == pcie.gather_seconds(1e9, 1) == 0
    with pytest.raises(UsageError, match="no all-reduce called 'nvls'; it has: ring, ring-host, one-shot"):
        pcie.only("nvls")


def test_every_profile_is_whole():
    for name, machine in PROFILES.items():
        assert find_hardware(name) is machine and machine.source
        assert machine.flops_per_second("fp4") >= machine.flops_per_second("bf16")
        if len(machine.all_reduce) > 0:
            assert machine.all_reduce_seconds(1e6, 8) > machine.all_reduce_seconds(1e3, 2) > 0


def test_a_profile_of_ones_own(written):
    machine = find_hardware(written(OWN | {"step_us": 300}))
    assert machine == Hardware(
        name="box",
        memory_gb=24,
        memory_gb_s=1000,
        tflops={"bf16": 100, "fp8": 200},
        step_us=300,
        all_reduce={"ring": AllReduce("ring", 5, 1, 10)},
    )
    assert machine.bytes_per_second == pytest.approx(0.9e12)
    assert machine.flops_per_second("fp8") == pytest.approx(1.5e14)
    assert machine.flops_per_second("fp4") == machine.flops_per_second("bf16")  # it has no peak of its own


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("memory_gb: [", "is not YAML"),
        ("", "must hold keys and values, found NoneType"),
        ("- 1\n- 2", "must hold keys and values, found list"),
        ({**OWN, "bandwidth": 5}, "bandwidth: Unexpected keyword argument, found 5"),
        ({k: v for k, v in OWN.items() if k != "memory_gb_s"}, "memory_gb_s: Field required"),
        ({**OWN, "memory_gb_s": "fast"}, "memory_gb_s: Input should be a valid number, found 'fast'"),
        ({**OWN, "memory_gb_s": 0}, "memory_gb_s: Input should be greater than 0, found 0"),
        ({**OWN, "kernel_us": -1}, "kernel_us: Input should be greater than or equal to 0, found -1"),
        ({**OWN, "memory_efficiency": 90}, "memory_efficiency: Input should be less than or equal to 1, found 90"),
        ({**OWN, "tflops": {"fp8": 5}}, "tflops: expected bf16, and fp8, int8, fp4 where they are faster"),
        ({**OWN, "tflops": {"bf16": 5, "fp64": 5}}, "tflops: expected bf16, and fp8"),
        ({**OWN, "tflops": {"bf16": True}}, "tflops.bf16: Input should be a valid number, found True"),
        ({**OWN, "tflops": 100}, "tflops: Input should be a valid dictionary, found 100"),
        (
            {**OWN, "all_reduce": {"x": {"algorithm": "magic", "base_us": 1, "hop_us": 1, "gb_s": 1}}},
            "all_reduce.x.algorithm: Input should be 'ring'",
        ),
        ({**OWN, "all_reduce": {"x": {"algorithm": "ring"}}}, "all_reduce.x.base_us: Field required"),
        ({**OWN, "all_reduce": {"x": 5}}, "all_reduce.x: Input should be a dictionary"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_profiles_that_are_none(written, content, words):
    with pytest.raises(UsageError) as error:
        find_hardware(written(content))
    assert words in str(error.value) and "box.yaml" in str(error.value) and "\n" not in str(error.value)


def test_unknown_names(tmp_path):
    with pytest.raises(UsageError, match=r"no hardware called 'h1000'.*h100-sxm"):
        find_hardware("h1000")
    with pytest.raises(UsageError, match="cannot be read"):
        find_hardware(str(tmp_path / "none.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UsageError, match="cannot be read"):
        find_hardware(str(tmp_path / "binary.yaml"))
