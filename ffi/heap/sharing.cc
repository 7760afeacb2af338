#include "heap/sharing.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <random>
#include <set>

namespace jax_ep {
namespace {

uint64_t number_of_this_process() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return number;
}

// Maps every region of another process once, whatever the number of groups; mappings stay until the process ends.
char* map_once(const Note& request, int descriptor, const std::vector<int>& devices) {
  struct Mapping {
    char* base = nullptr;
    std::set<int> users;
  };
  static std::mutex mutex;
  static auto* const mappings = new std::map<std::pair<uint64_t, uint64_t>, Mapping>;  // by owner and region
  std::lock_guard lock(mutex);
  Mapping& mapping = (*mappings)[{request.owner, request.region}];
  std::vector<int> further;
  for (const int device : devices)
    if (!mapping.users.count(device)) further.push_back(device);
  if (!mapping.base)
    mapping.base = map_region(descriptor, request.bytes, devices);
  else
    allow_users(mapping.base, request.bytes, further);
  mapping.users.insert(devices.begin(), devices.end());
  return mapping.base;
}

Note request_of(const Region& region, int seat) {
  Note note{};
  note.kind = Note::Kind::share;
  note.seat = seat;
  note.owner = number_of_this_process();
  note.region = region.id;
  note.bytes = region.bytes;
  return note;
}

}  // namespace

Sharing::Sharing(std::vector<int> sockets, std::vector<int> devices, double timeout_seconds,
                 std::function<void(int)> lost)
    : sockets_(std::move(sockets)),
      devices_(std::move(devices)),
      timeout_(timeout_seconds),
      lost_(std::move(lost)),
      left_(sockets_.size()),
      thread_([this] { answer(); }) {}

Sharing::~Sharing() {
  close();
  for (const int socket : sockets_)
    if (socket >= 0) ::close(socket);
}

void Sharing::close() {
  {
    std::lock_guard lock(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  Note goodbye{};
  goodbye.kind = Note::Kind::goodbye;
  for (const int socket : sockets_) {
    if (socket < 0) continue;
    send_note(socket, goodbye);
    shutdown(socket, SHUT_RDWR);  // wakes the thread; the peer still reads what was sent
  }
  changed_.notify_all();
  thread_.join();
}

std::vector<char*> Sharing::share(const Region& region, int seat) {
  std::unique_lock lock(mutex_);
  const auto [found, first] = shared_.try_emplace(region.id);
  Shared& shared = found->second;
  if (first) {
    shared.bases.resize(sockets_.size());
    for (size_t process = 0; process < sockets_.size(); ++process)
      if (sockets_[process] < 0) shared.bases[process] = region.base;
    lock.unlock();  // sending may block until the other process reads, and the thread must answer meanwhile
    for (const int socket : sockets_)
      if (socket >= 0) send_note(socket, request_of(region, seat), region.descriptor);
    lock.lock();
  }
  for (size_t process = 0; process < sockets_.size(); ++process)
    await(lock, static_cast<int>(process), [&] { return shared.bases[process] || !shared.refusal.empty(); });
  if (!shared.refusal.empty()) throw GroupException({"JaxEpError", shared.refusal, true});
  return shared.bases;
}

char* Sharing::await_heap(int process, int seat) {
  std::unique_lock lock(mutex_);
  await(lock, process, [&] { return heaps_.count(seat) > 0; });
  return heaps_[seat];
}

void Sharing::await(std::unique_lock<std::mutex>& lock, int process, const std::function<bool()>& ready) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  const bool in_time = changed_.wait_until(lock, std::chrono::time_point_cast<std::chrono::nanoseconds>(deadline),
                                           [&] { return ready() || left_[process] || closing_; });
  if (ready()) return;
  const std::string who = "process " + std::to_string(process) + " of the group ";
  if (closing_) throw GroupException({"GroupClosedError", "the group was closed before the op ran", true});
  if (in_time) throw GroupException({"PeerLostError", who + "has left it", true});
  char text[96];
  std::snprintf(text, sizeof(text), "did not map this process' memory within %g s", timeout_.count());
  throw GroupException({"PeerTimeoutError", who + text, true});
}

// The thread: until this process closes or all others are gone.
void Sharing::answer() {
  for (;;) {
    std::vector<pollfd> open;
    std::vector<int> processes;
    {
      std::lock_guard lock(mutex_);
      if (closing_) return;
      for (size_t process = 0; process < sockets_.size(); ++process) {
        if (sockets_[process] < 0 || left_[process]) continue;
        open.push_back({sockets_[process], POLLIN, 0});
        processes.push_back(static_cast<int>(process));
      }
    }
    if (open.empty()) return;
    poll(open.data(), open.size(), -1);
    for (size_t i = 0; i < open.size(); ++i) {
      if (!open[i].revents) continue;
      Note note{};
      int descriptor = -1;
      if (receive_note(open[i].fd, &note, &descriptor))
        handle(processes[i], note, descriptor);
      else
        end_of(processes[i]);
      if (descriptor >= 0) ::close(descriptor);
    }
  }
}

void Sharing::handle(int process, const Note& note, int descriptor) {
  if (note.kind == Note::Kind::share) {
    const Note answer = map(note, descriptor);
    send_note(sockets_[process], answer);
    return;
  }
  std::lock_guard lock(mutex_);
  if (note.kind == Note::Kind::goodbye) left_[process] = true;
  if (const auto asked = shared_.find(note.region); asked != shared_.end()) {
    if (note.kind == Note::Kind::mapped) asked->second.bases[process] = reinterpret_cast<char*>(note.base);
    if (note.kind == Note::Kind::refused)
      asked->second.refusal = "process " + std::to_string(process) + " of the group: " + note.text;
  }
  changed_.notify_all();
}

Note Sharing::map(const Note& request, int descriptor) {
  Note answer = request;
  try {
    char* base = map_once(request, descriptor, devices_);
    answer.kind = Note::Kind::mapped;
    answer.base = reinterpret_cast<uint64_t>(base);
    std::lock_guard lock(mutex_);
    if (request.seat != kNoSeat) heaps_[request.seat] = base;
    changed_.notify_all();
  } catch (const std::exception& error) {
    answer.kind = Note::Kind::refused;
    std::snprintf(answer.text, sizeof(answer.text), "%s", error.what());
  }
  return answer;
}

void Sharing::end_of(int process) {
  {
    std::lock_guard lock(mutex_);
    left_[process] = true;
    if (closing_) return;
  }
  try {
    lost_(process);
  } catch (const std::exception&) {  // then the kernels find out by their deadline
  }
  changed_.notify_all();
}

}  // namespace jax_ep
