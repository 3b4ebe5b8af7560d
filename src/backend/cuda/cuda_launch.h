/* cuda_launch: kernels that begin while the one before ends. Launched by cu_launch, a kernel's blocks may take their
 * places as soon as all blocks of the kernel before have said cu_go or ended, so that the launch itself is hidden.
 * The order of work is kept by cu_wait alone. Device code and its launch. */
#ifndef HEARTH_CUDA_LAUNCH_H
#define HEARTH_CUDA_LAUNCH_H

#include "cuda_priv.h"

/* Returns when all that was queued before is done and its writes can be seen. Every thread of a kernel launched by
 * cu_launch calls it, before it may end and before it reads or writes what another kernel writes; weights may be read
 * earlier. */
static __device__ __forceinline__ void cu_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/* Lets the next kernel's blocks take their places. */
static __device__ __forceinline__ void cu_go() { asm volatile("griddepcontrol.launch_dependents;"); }

/* Queues kernel<<<grid, threads, shared>>>(args). True if nothing failed so far. The one template that is not of a
 * kernel: it has the compiler check the arguments, as <<<>>> does. */
template <typename... P, typename... A>
static bool cu_launch(struct cuda *c, const char *what, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                      A... args)
{
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = c->stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cu_ok(c, what, cudaLaunchKernelEx(&config, kernel, args...));
}

#endif
