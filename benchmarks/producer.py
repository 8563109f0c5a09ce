"""A kernel ahead of the chain in the stream: it lets the chain start at once, holds on, and writes its results late.

One CTA of 32 threads per SM: few registers and no shared memory, so that a CTA of a chain can lie beside it, and the
on-chip memory of the SM asked for as shared memory, so that the chain need not wait for another division of it.
"""

from ctypes import c_int32, c_int64, c_void_p

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dspark_kernels._device.cubin_launch import ask

THREADS = 32
CARVEOUT_PERCENT = 100  # of the on-chip memory, as shared memory
WORD_BYTES = 4


class ProducerKernel:
    """Lets its dependents launch, waits `hold_ns`, then copies `words` 32-bit words from `source` to `target`."""

    def __init__(self, ctas: int) -> None:
        self.ctas = ctas

    @cute.kernel
    def kernel(self, source: cute.Pointer, target: cute.Pointer, words: Int32, hold_ns: Int64):
        cute.arch.griddepcontrol_launch_dependents()
        end = cute.arch.globaltimer() + hold_ns
        while cute.arch.globaltimer() < end:
            pass
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        layout = cute.make_layout(words)
        given, wanted = cute.make_tensor(source, layout), cute.make_tensor(target, layout)
        for i in cutlass.range(cta * THREADS + tid, words, self.ctas * THREADS, unroll=1):
            wanted[i] = given[i]

    @cute.jit
    def __call__(self, source: cute.Pointer, target: cute.Pointer, words: Int32, hold_ns: Int64, stream):
        self.kernel(source, target, words, hold_ns).launch(
            grid=[self.ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )


def _pointer(address: int) -> cute.Pointer:
    return make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=WORD_BYTES)


def compile_producer(ctas: int, *, arch: str | None = None, options: str = ""):
    """Compiles the kernel for `ctas` CTAs; needs no GPU. `arch` such as "sm_90a"; default: this machine's GPU."""
    arguments = (_pointer(WORD_BYTES), _pointer(WORD_BYTES), Int32(0), Int64(0), make_fake_stream())
    flags = f"--gpu-arch {arch} {options}" if arch else options
    return cute.compile(ProducerKernel(ctas), *arguments, options=flags)


class Producer:
    """The compiled kernel for one GPU, one CTA per SM. It is launched on the current stream, as any kernel is.

    It is launched by the driver, which is asked for CARVEOUT_PERCENT of the on-chip memory as shared memory: launched by CuTe DSL
    with that as an option, it left no room, and the chain started at its end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ctas = torch.cuda.get_device_properties(device).multi_processor_count
        compiled = compile_producer(self._ctas, options="--keep-cubin")
        (name,) = compiled.kernel_info
        self._library = ask(driver.cuLibraryLoadData(compiled.artifacts.CUBIN, [], [], 0, [], [], 0), "producer")
        kernel = ask(driver.cuLibraryGetKernel(self._library, name.encode()), "producer")
        self._function = ask(driver.cuKernelGetFunction(kernel), "producer")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        ask(driver.cuFuncSetAttribute(self._function, attribute, CARVEOUT_PERCENT), "producer")

    def hold(self, hold_us: float) -> None:
        """Keep every SM for `hold_us` microseconds and write nothing."""
        self._launch(0, 0, 0, hold_us)

    def copy(self, source: torch.Tensor, target: torch.Tensor, hold_us: float) -> None:
        """Copy int32 tensors of one size, both contiguous on the device, once `hold_us` microseconds have passed."""
        for name, tensor in (("source", source), ("target", target)):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.numel() != source.numel():
                raise ValueError(
                    f"{name}: expected int32, contiguous, {source.numel()} entries, got {tensor.dtype} "
                    f"{list(tensor.shape)} strides {list(tensor.stride())}"
                )
        self._launch(source.data_ptr(), target.data_ptr(), source.numel(), hold_us)

    def _launch(self, source: int, target: int, words: int, hold_us: float) -> None:
        stream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        arguments = ((source, target, words, round(hold_us * 1000)), (c_void_p, c_void_p, c_int32, c_int64))
        ask(driver.cuLaunchKernel(self._function, self._ctas, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0), "producer")
