// An imitation of libamdhip64.so over host memory, for hip-python itself: it writes down what it is asked, a line a call.
//
// A launch copies what kernelParams points to, as the runtime does, and lets the "kernel" write one event to the ring.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned char properties[8192];
static size_t properties_bytes;
static int ready = 1, devices = 1;
static uint64_t ring_offset, args_bytes;

#define SAY(...) (fprintf(stderr, "call " __VA_ARGS__), fputc('\n', stderr), 0)

void fake_properties(const void* data, size_t bytes) {
  memcpy(properties, data, bytes);
  properties_bytes = bytes;
}
void fake_args(uint64_t bytes, uint64_t ring) { args_bytes = bytes, ring_offset = ring; }
void fake_ready(int now) { ready = now; }
void fake_devices(int count) { devices = count; }

int hipGetDeviceCount(int* count) { return *count = devices, devices ? 0 : 100; }
int hipRuntimeGetVersion(int* version) { return *version = 70200000, 0; }
int hipGetDevicePropertiesR0600(void* to, int device) {
  memcpy(to, properties, properties_bytes);
  return SAY("properties %d", device);
}
int hipDeviceGetAttribute(int* value, int attribute, int device) {
  *value = getenv("FAKE_ATTRIBUTE") ? atoi(getenv("FAKE_ATTRIBUTE")) : 1;
  return SAY("attribute %d %d", attribute, device);
}
int hipSetDevice(int device) { return device == 0 ? 0 : 101; }
int hipStreamCreateWithFlags(void** stream, unsigned flags) { return *stream = malloc(1), SAY("stream %u", flags); }
int hipStreamDestroy(void* stream) { return free(stream), 0; }
int hipStreamSynchronize(void* stream) { return stream ? 0 : 400; }
int hipEventCreateWithFlags(void** event, unsigned flags) { return *event = malloc(1), SAY("event %u", flags); }
int hipEventDestroy(void* event) { return free(event), 0; }
int hipEventRecord(void* event, void* stream) { return event && stream ? SAY("record") : 400; }
int hipEventQuery(void* event) { return !event ? 400 : ready ? 0 : 600; }
int hipEventElapsedTime(float* ms, void* start, void* stop) { return *ms = 2.5f, start == stop ? 400 : 0; }
int hipMalloc(void** at, size_t bytes) { return *at = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), *at ? 0 : 2; }
int hipFree(void* at) { return free(at), 0; }
int hipHostMalloc(void** at, size_t bytes, unsigned flags) { return SAY("host %x", flags), hipMalloc(at, bytes); }
int hipHostFree(void* at) { return free(at), 0; }
int hipHostGetDevicePointer(void** device, void* host, unsigned flags) { return *device = host, (int)flags; }
int hipMemGetInfo(size_t* left, size_t* all) { return *left = 1 << 20, *all = 1 << 30, 0; }
int hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  memcpy(to, from, bytes);
  return stream ? SAY("copy %zu %d", bytes, kind) : 400;
}
int hipMemsetAsync(void* at, int value, size_t bytes, void* stream) { return memset(at, value, bytes), stream ? 0 : 400; }
int hipModuleLoadData(void** module, const void* image) {
  *module = malloc(1);
  return SAY("load %.3s", (const char*)image + 1);
}
int hipModuleUnload(void* module) { return free(module), 0; }
int hipModuleGetFunction(void** function, void* module, const char* name) {
  *function = malloc(1);
  return module ? SAY("function %s", name) : 400;
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int size, size_t shared) {
  *blocks = 1;
  return function ? SAY("occupancy %d %zu", size, shared) : 400;
}
int hipModuleLaunchCooperativeKernel(
    void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void* stream, void** params) {
  if (!function || !stream) return 400;
  const unsigned char* args = params[0];
  uint64_t ring, overflow = *(uint64_t*)params[1], size = *(uint64_t*)params[2], seats = *(uint64_t*)params[3], sum = 0;
  memcpy(&ring, args + ring_offset, 8);
  for (uint64_t i = 0; i < args_bytes; ++i) sum = sum * 31 + args[i];
  if (ring) ++*(uint64_t*)ring;
  memset((void*)overflow, 1, size * gx);
  for (unsigned i = 0; i < gx; ++i) ((uint32_t*)seats)[32 + i] = i % 2;
  return SAY("launch %u %u %u %u %u %u %u %llu", gx, gy, gz, bx, by, bz, shared, (unsigned long long)sum);
}
