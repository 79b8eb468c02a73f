/* Takes the place of two functions of torch's libc10_cuda.so when it is loaded first (LD_PRELOAD).
 * There is no GPU until fake_cuda.py sets `gpu_proof_device_count`; autograd asks for the number when
 * it starts its threads, and guards ask for the context. */

int gpu_proof_device_count = 0;

/* c10::cuda::device_count() */
signed char device_count(void) __asm__("_ZN3c104cuda12device_countEv");
signed char device_count(void) {
    return (signed char)gpu_proof_device_count;
}

/* c10::cuda::hasPrimaryContext(signed char) */
int has_primary_context(signed char device) __asm__("_ZN3c104cuda17hasPrimaryContextEa");
int has_primary_context(signed char device) {
    (void)device;
    return 0;
}
