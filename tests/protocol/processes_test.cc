// Two real processes with the memory code of a GPU, over a GPU that is the host: rows go straight into the peers' pools
// where those can be mapped, also after they have grown, and through staging elsewhere. Groups that are closed leave
// their memory to the next ones.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "platform/vmm.h"
#include "ranks.h"
#include "runtime/gpu/kernel_launch.h"
#include "runtime/reach.h"

namespace jax_ep {

gpu::Error launch_clock(ClockRequest*, int) { return gpu::kFailed; }  // only profiles ask for the time

namespace {

constexpr int kRowBytes = 48;
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
  args.slices = 1, args.operand_rows = kRanks, args.output_rows = kRanks + 1, args.row_bytes = kRowBytes;
  args.operand = operand.data(), args.input_offsets = from.data(), args.send_sizes = one.data();
  args.output_offsets = to.data(), args.recv_sizes = one.data(), args.output = result;

  const auto reached = reach(group, {0, rank}, args);
  expect(reached.after.size() == (staged ? 1 : 0) && reached.before.size() == reached.after.size(),
         "only what peers cannot map is staged");
  for (const Copy& copy : reached.before) std::memcpy(copy.to, copy.from, copy.bytes);
  run_kernel(reached.comm, reached.args, Coop{});
  for (const Copy& copy : reached.after) std::memcpy(copy.to, copy.from, copy.bytes);

  for (int i = 0; i < (kRanks + 1) * kRowBytes; ++i) {
    const int source = i / kRowBytes;
    expect(result[i] == (source == kRanks ? 77 : 10 * source + rank), "every rank's row is where it belongs");
  }
}

// What a process has of a group of two, with two ranks each.
struct Part {
  int process;
  Group group;

  Part(int process, int socket, bool poison)
      : process(process),
        group({process == 0 ? std::vector{0, 1, -1, -1} : std::vector{-1, -1, 0, 1}}, 20.0, poison,
              Neighbours{{{0, 0, 1, 1}}, process == 0 ? std::vector{-1, socket} : std::vector{socket, -1}, 20.0}) {}

  void exchange_on_both_ranks(char* memory, bool staged) {
    const auto body = [&](int i) { exchange(group, 2 * process + i, memory + 4096 * i + 256, staged); };
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  }
};

void in_process(int process, int socket) {
  Part part(process, socket, /*poison=*/true);
  char* const pool = make_pool();
  std::vector<char> unmappable(2 * 4096);
  for (int i = 0; i < 3; ++i) {
    part.exchange_on_both_ranks(pool, false);
    part.exchange_on_both_ranks(unmappable.data(), true);
  }
  part.exchange_on_both_ranks(make_pool() + kPoolBytes / 2, false);
  part.exchange_on_both_ranks(process == 0 ? pool : unmappable.data(), process == 1);  // each as it can
  expect(!part.group.take_error(), "no error is reported");
  part.group.close();
}

int lines_of(const char* path) {
  std::ifstream file(path);
  int lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

// Groups one after another use the memory of the first ones, which stays mapped here and at the peer.
void open_many(int process, const std::vector<int>& sockets) {
  std::vector<char> unmappable(2 * 4096);
  int descriptors = 0, mappings = 0;
  std::set<const SignalPad*> signal_pads;
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    Part part(process, sockets[i], /*poison=*/false);
    for (int rank = 0; rank < kRanks; ++rank) signal_pads.insert(part.group.signal_pad({0, rank}));
    part.exchange_on_both_ranks(unmappable.data(), true);
    part.group.close();
    const int now = count_entries("/proc/self/fd") + static_cast<int>(i);  // one more of the given sockets is closed
    if (i == 2) descriptors = now, mappings = lines_of("/proc/self/maps"), signal_pads.clear();
    if (i < 3) continue;
    expect(now == descriptors, "no descriptor is left of a group");
    expect(lines_of("/proc/self/maps") <= mappings + 2,
           "no mapping is left of a group");  // the allocator's come and go
  }
  expect(signal_pads.size() <= 2 * kRanks, "signal pads are used again");
}

// Runs the body as each of two processes, which are joined by so many sockets. Both are children of this one, which
// opens no group: memory that is kept for the next group has one owner.
template <class Body>
void in_two_processes(int joins, Body body) {
  std::vector<int> sockets[2];
  for (int i = 0; i < joins; ++i) {
    const std::array<int, 2> pair = socket_pair();
    for (const int side : {0, 1}) sockets[side].push_back(pair[side]);
  }
  std::fflush(nullptr);  // or the children print it again
  pid_t children[2];
  for (const int process : {0, 1}) {
    children[process] = fork();
    if (children[process] != 0) continue;
    for (const int socket : sockets[1 - process]) close(socket);
    try {
      body(process, sockets[process]);
    } catch (...) {  // a check that failed, and has said so
    }
    std::fflush(nullptr);
    _exit(failed_checks > 0);
  }
  for (const auto& side : sockets)
    for (const int socket : side) close(socket);
  for (const pid_t child : children) {
    int status = 1;
    waitpid(child, &status, 0);
    expect(status == 0, "both processes find no fault");
  }
}

TEST_CASE("rows go into pools of peers where they can be mapped and through staging elsewhere") {
  in_two_processes(1, [](int process, const std::vector<int>& sockets) { in_process(process, sockets[0]); });
}
TEST_CASE("groups that are closed leave their memory to the next ones") { in_two_processes(20, open_many); }

// A socket that is connected to a child of this process, which stops itself at once.
std::pair<Descriptor, pid_t> stopped_process() {
  const Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET, 0));
  sockaddr_un name{AF_UNIX, {}};
  socklen_t bytes = sizeof(name.sun_family);  // of no name: the kernel gives it one
  expect(bind(listener.get(), reinterpret_cast<sockaddr*>(&name), bytes) == 0 && listen(listener.get(), 1) == 0,
         "a listener is made");
  bytes = sizeof(name);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &bytes);
  const pid_t child = fork();
  if (child == 0) {
    const Descriptor connection(socket(AF_UNIX, SOCK_SEQPACKET, 0));
    connect(connection.get(), reinterpret_cast<sockaddr*>(&name), bytes);
    raise(SIGSTOP);
    _exit(0);
  }
  int status;
  waitpid(child, &status, WUNTRACED);
  return {Descriptor(accept(listener.get(), nullptr, nullptr)), child};
}

TEST_CASE("a stopped process is told from one that has ended") {
  auto [connection, child] = stopped_process();
  Sharing sharing({{{0, 1}}, {-1, dup(connection.get())}, 0.05}, {0}, [](int, const std::string&) {});
  CHECK_THROWS_WITH(sharing.await_signal_pad(1, 1),
                    "PeerTimeoutError: process 1 did not share its signal pad within 0.05 s: it is stopped");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  while (sharing.state_of(1) != "it has ended") std::this_thread::yield();
}

// Memory that one holder has let go of is the next one's, and clear; a region's descriptor ends with this program.
TEST_CASE("memory that was let go of is used again and is clear") {
  void* memory[3];
  for (void*& each : memory) {
    const std::shared_ptr<void> held = allocate_on_device(0, 4096), other = allocate_on_device(0, 8192);
    const std::shared_ptr<void> host = allocate_on_host(4096);
    each = held.get();
    expect(held != host && *static_cast<char*>(held.get()) == 0, "memory is clear, and of its own kind");
    std::memset(held.get(), 1, 4096);
  }
  expect(memory[0] == memory[1] && memory[1] == memory[2], "memory is used again");

  Region first;
  {
    const auto held = allocate_region(0, 4096, {0, 1});
    first = *held;
    expect(allocate_region(0, 4096, {0, 1})->id != first.id, "a region has one holder");
  }
  expect(allocate_region(0, 4096, {0})->id != first.id, "a region is for the devices that were named");
  const auto again = allocate_region(0, 4096, {0, 1});
  const auto another = allocate_region(0, 4096, {0, 1});
  expect(again->id == first.id || another->id == first.id, "a region is used again, with its number");
  expect(fcntl(again->descriptor, F_GETFD) & FD_CLOEXEC, "its descriptor ends with this program");
}

}  // namespace
}  // namespace jax_ep
