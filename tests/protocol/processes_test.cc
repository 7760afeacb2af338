// Two real processes with the memory code of a GPU, over a GPU that is the host: rows go straight into the peers' pools
// where those can be mapped, also after they have grown, and through staging elsewhere.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "expect.h"
#include "heap/reach.h"
#include "kernels/kernels.h"
#include "platform/gpu/kernel_launch.h"
#include "vmm.h"

namespace jax_ep {

gpu::Error launch_clock(ClockFace*, int) { return gpu::kFailed; }  // only recordings ask for the time

namespace {

constexpr int kRanks = 4, kRowBytes = 48;
constexpr std::size_t kPoolBytes = 1 << 22;

// A pool as XLA has it: one allocation, of which buffers are parts.
char* make_pool() {
  gpu::Allocation allocation;
  void* base = nullptr;
  const bool made = gpu::create_memory(&allocation, kPoolBytes, 0) == gpu::kSuccess &&
                    gpu::reserve_addresses(&base, kPoolBytes) == gpu::kSuccess &&
                    gpu::map_memory(base, kPoolBytes, allocation) == gpu::kSuccess &&
                    gpu::allow_access(base, kPoolBytes, 0) == gpu::kSuccess;
  expect(made, "a pool is made");
  return static_cast<char*>(base);
}

// Every rank sends a row to every rank; one more row of the result keeps what it held.
void exchange(Group& group, int rank, char* result, bool staged) {
  std::vector<char> operand(kRanks * kRowBytes);
  std::vector<int32_t> from(kRanks), one(kRanks, 1), to(kRanks, rank);
  for (int peer = 0; peer < kRanks; ++peer) from[peer] = peer;
  for (int i = 0; i < kRanks * kRowBytes; ++i) operand[i] = static_cast<char>(10 * rank + i / kRowBytes);
  std::memset(result, 77, (kRanks + 1) * kRowBytes);
  RaggedArgs args{};
  args.slices = 1, args.operand_rows = kRanks, args.result_rows = kRanks + 1, args.row_bytes = kRowBytes;
  args.operand = operand.data(), args.input_offsets = from.data(), args.send_sizes = one.data();
  args.output_offsets = to.data(), args.recv_sizes = one.data(), args.result = result;

  const auto reached = reach(group, {0, rank}, args);
  expect(reached.after.size() == (staged ? 1 : 0) && reached.before.size() == reached.after.size(),
         "only what peers cannot map is staged");
  for (const Copy& copy : reached.before) std::memcpy(copy.to, copy.from, copy.bytes);
  run_kernel(reached.comm, reached.args, Team{});
  for (const Copy& copy : reached.after) std::memcpy(copy.to, copy.from, copy.bytes);

  for (int i = 0; i < (kRanks + 1) * kRowBytes; ++i) {
    const int source = i / kRowBytes;
    expect(result[i] == (source == kRanks ? 77 : 10 * source + rank), "every rank's row is in its place");
  }
}

void in_process(int process, int socket) {
  const std::vector<int> line = process == 0 ? std::vector{0, 1, -1, -1} : std::vector{-1, -1, 0, 1};
  std::vector<int> sockets(2, -1);
  sockets[1 - process] = socket;
  Group group({line}, 20.0, /*poison=*/true, Neighbours{{{0, 0, 1, 1}}, sockets});
  char* pools[2] = {make_pool(), nullptr};
  const auto on_both_ranks = [&](char* memory, bool staged) {
    const auto body = [&](int i) { exchange(group, 2 * process + i, memory + 4096 * i + 256, staged); };
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  };
  std::vector<char> unmappable(2 * 4096);
  for (int i = 0; i < 3; ++i) {
    on_both_ranks(pools[0], false);
    on_both_ranks(unmappable.data(), true);
  }
  pools[1] = make_pool();
  on_both_ranks(pools[1] + kPoolBytes / 2, false);
  on_both_ranks(process == 0 ? pools[0] : unmappable.data(), process == 1);  // each as it can
  expect(!group.take_error(), "no error is reported");
  group.close();
}

}  // namespace
}  // namespace jax_ep

int main() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0) return 1;
  const pid_t child = fork();
  close(sockets[child == 0 ? 0 : 1]);
  jax_ep::in_process(child == 0, sockets[child == 0]);
  if (child == 0) _exit(0);
  int status = 1;
  waitpid(child, &status, 0);
  if (status != 0) return 1;
  std::puts("processes: all checks passed");
  return 0;
}
