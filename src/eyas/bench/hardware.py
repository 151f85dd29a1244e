"""What a machine can do, by data sheets and general micro-benchmarks: profiles that come along, and own ones in YAML.

No number here was taken from a measurement of speculative decoding, and none was adjusted to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from eyas.core import UsageError, one_line

FORMATS = ("bf16", "fp8", "int8", "fp4")  # what matrix products run in
_Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1, strict=True)]


def _known(peaks: Mapping[str, float]) -> Mapping[str, float]:
    if "bf16" not in peaks or not peaks.keys() <= set(FORMATS):
        raise ValueError(f"expected bf16, and {', '.join(FORMATS[1:])} where they are faster")
    return peaks


@dataclass(frozen=True, config={"extra": "forbid"})
class AllReduce:
    """One way of adding up a message of n bytes over G GPUs.

    ========  ======================================================================================
    ring      base + 2 (G-1) hop + 2 (G-1)/G n/bandwidth   reduce-scatter, then all-gather (Thakur et al. 2005)
    one-shot  base + (G-1) hop + (G-1) n/bandwidth         every GPU reads all messages and adds them up itself
    ========  ======================================================================================

    ``gb_s`` is what one GPU sends and receives at once, in GB/s (nccl-tests' bus bandwidth). Where ``stock`` is false
    engines do not use it unless they are told to.
    """

    algorithm: Literal["ring", "one-shot"]
    base_us: _NotNegative
    hop_us: _NotNegative
    gb_s: _Positive
    stock: bool = True

    def seconds(self, size: float, gpus: int) -> float:
        """Of an all-reduce of ``size`` bytes."""
        hops, volume = {
            "ring": (2 * (gpus - 1), 2 * (gpus - 1) / gpus),
            "one-shot": (gpus - 1, gpus - 1.0),
        }[self.algorithm]
        return self._time(hops, volume * size)

    def gather_seconds(self, size: float, gpus: int) -> float:
        """Of an all-gather: ``size`` bytes in all, of which each GPU has its part."""
        return self._time(gpus - 1, (gpus - 1) / gpus * size)

    def _time(self, hops: int, volume: float) -> float:
        return (self.base_us + hops * self.hop_us) * 1e-6 + volume / (self.gb_s * 1e9)


@dataclass(frozen=True, config={"extra": "forbid"})
class Hardware:
    """One GPU (or CPU), and how several of it talk. Field names and units are those of a profile's YAML file.

    ``memory_efficiency`` and ``compute_efficiency`` are the shares of the two peaks that large kernels reach;
    ``kernel_us`` is what each kernel takes beyond its transfers and arithmetic; ``step_us`` is work of the host in each
    decoding step that an engine does not hide (0: unknown, and none).
    """

    name: str
    memory_gb: _Positive
    memory_gb_s: _Positive
    tflops: Annotated[Mapping[str, _Positive], AfterValidator(_known)]  # dense peaks; others run in bf16
    memory_efficiency: _Share = 0.9
    compute_efficiency: _Share = 0.75
    kernel_us: _NotNegative = 2.0
    step_us: _NotNegative = 0.0
    all_reduce: Mapping[str, AllReduce] = field(default_factory=dict)
    source: str = ""

    @property
    def bytes_per_second(self) -> float:
        return self.memory_gb_s * 1e9 * self.memory_efficiency

    def flops_per_second(self, format: str) -> float:
        return self.tflops.get(format, self.tflops["bf16"]) * 1e12 * self.compute_efficiency

    def all_reduce_seconds(self, size: float, gpus: int) -> float:
        """The fastest of what engines use: they choose by size."""
        return 0.0 if gpus == 1 else min(way.seconds(size, gpus) for way in self._ways())

    def gather_seconds(self, size: float, gpus: int) -> float:
        return 0.0 if gpus == 1 else min(way.gather_seconds(size, gpus) for way in self._ways())

    def _ways(self) -> list[AllReduce]:
        ways = [way for way in self.all_reduce.values() if way.stock]
        if not ways:
            raise UsageError(f"{self.name} has no all-reduce that engines use unasked: it is one GPU only.")
        return ways

    def only(self, name: str) -> Hardware:
        """The same machine with the all-reduce called ``name`` and no other."""
        if name not in self.all_reduce:
            known = ", ".join(self.all_reduce) or "none"
            raise UsageError(f"{self.name} has no all-reduce called {name!r}; it has: {known}.")
        return replace(self, all_reduce={name: replace(self.all_reduce[name], stock=True)})


# All-reduce. Latencies of the rings: NCCL's own cost model (src/graph/tuning.cc: ring LL base 6.6 us; a hop 0.6 us over
# NVLink, 1.0 us over PCIe). nccl-tests on 8 and 4 RTX PRO 6000 gave 24.1 and 13.5 us for 1 KB, the model says 20.6 and
# 12.6. Through host memory: nccl-tests on 8 RTX 4090, 42.1 us for 8 bytes (NVIDIA/nccl issue 1530).
def _nvlink(ring_gb_s: float, one_shot_gb_s: float) -> dict[str, AllReduce]:
    """Ring: bus bandwidth of nccl-tests. One-shot: SGLang pull request 2904, H100, 3.7 to 5.9 us for 2 to 8 GPUs."""
    return {
        "one-shot": AllReduce("one-shot", 3.4, 0.36, one_shot_gb_s),
        "ring": AllReduce("ring", 6.6, 0.6, ring_gb_s),
    }


def _pcie(ring_gb_s: float) -> dict[str, AllReduce]:
    """One-shot: github.com/voipmonitor/rtx6kpro, 6.1 and 7.5 us for 1 KB on 4 and 8 GPUs; stock engines have none here.

    Ring through host memory is what remains where GPUs cannot reach each other's memory.
    """
    return {
        "ring": AllReduce("ring", 6.6, 1.0, ring_gb_s),
        "ring-host": AllReduce("ring", 6.6, 2.5, ring_gb_s / 2, stock=False),
        "one-shot": AllReduce("one-shot", 5.05, 0.35, 30.0, stock=False),
    }


def _gpu(name: str, gb: float, gb_s: float, bf16: float, ways: dict[str, AllReduce], **more: Any) -> Hardware:
    """From NVIDIA's data sheet; ``more``: other formats' peaks, and fields of Hardware."""
    peaks = {"bf16": bf16, **{format: more.pop(format) for format in FORMATS if format in more}}
    return Hardware(name, gb, gb_s, peaks, all_reduce=ways, source="NVIDIA data sheet", **more)


# Without peer-to-peer: nccl-tests on 8 RTX 3090, 54.2 us for 8 bytes (NVIDIA/nccl issue 1439); RTX 4090 as above.
# Memory of the RTX PRO 6000: 1,488 GB/s in CUDA's p2pBandwidthLatencyTest (github.com/voipmonitor/rtx6kpro). A Xeon's
# peaks are 8 channels of DDR5-4800 and 56 cores of 2,048 AMX operations a cycle at 1.9 GHz; 5 us pass between its
# kernels for dispatch and a barrier, an order of magnitude and no measurement.
_RTX_4090, _RTX_3090 = ({"ring": AllReduce("ring", 6.6, hop_us, 10)} for hop_us in (2.5, 3.4))
_XEON = {"bf16": 218.0, "int8": 436.0}
PROFILES = {
    profile.name: profile
    for profile in (
        _gpu("a100-40gb-sxm", 40, 1555, 312, _nvlink(230, 65), int8=624),
        _gpu("a100-80gb-sxm", 80, 2039, 312, _nvlink(230, 65), int8=624),
        _gpu("h100-pcie", 80, 2000, 756, _pcie(40), fp8=1513, int8=1513),
        _gpu("h100-sxm", 80, 3350, 989, _nvlink(365, 100), fp8=1979, int8=1979),
        _gpu("h200-sxm", 141, 4800, 989, _nvlink(365, 100), fp8=1979, int8=1979),
        _gpu("h20", 96, 4000, 148, _nvlink(365, 100), fp8=296, int8=296),
        _gpu("b200", 180, 7700, 2250, _nvlink(730, 200), fp8=4500, int8=4500, fp4=9000),
        _gpu("l40s", 48, 864, 362, _pcie(20), fp8=733, int8=733),
        _gpu("rtx-pro-6000", 96, 1792, 500, _pcie(40), fp8=1000, int8=1000, fp4=2000, memory_efficiency=0.83),
        _gpu("rtx-4090", 24, 1008, 165, _RTX_4090, fp8=330, int8=660),
        _gpu("rtx-3090", 24, 936, 71, _RTX_3090, int8=284),
        Hardware("xeon-8480+", 512, 307, _XEON, compute_efficiency=0.5, kernel_us=5, source="Intel's specifications"),
    )
}


def find_hardware(name: str) -> Hardware:
    """A profile that comes along, or one from a YAML file. Raises UsageError that names what is wrong in it."""
    import yaml

    if name in PROFILES:
        return PROFILES[name]
    file = Path(name).expanduser()
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise UsageError(f"no hardware called {name!r}: name a .yaml file, or one of {', '.join(PROFILES)}.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{file} is not YAML: {one_line(error)}.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} must hold keys and values, found {type(content).__name__}.")
    try:
        return TypeAdapter(Hardware).validate_python({"name": file.stem, **content})
    except ValidationError as error:
        first = error.errors()[0]
        place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{file}: {place}: {said}, found {repr(first['input'])[:80]}.") from None
