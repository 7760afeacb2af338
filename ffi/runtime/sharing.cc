#include "runtime/sharing.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <random>
#include <stdexcept>

#include "comm/signal_pad.h"

namespace jax_ep {
namespace {

constexpr auto kFarewell = std::chrono::seconds(1);  // for a peer that does not read
constexpr std::size_t kMaxWaiting = 64;              // answers; with more, a peer's next request is not read

const std::string kBroke = "broke the protocol: ";

int milliseconds_until(std::chrono::steady_clock::time_point moment) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(moment - std::chrono::steady_clock::now());
  return static_cast<int>(std::max<int64_t>(0, left.count()));
}

// A mapped region of another process. All groups share one mapping.
struct Mapping {
  char* base;
  std::size_t bytes;
  std::set<int> users;  // devices
  int holders;
};

struct Mappings {
  std::mutex mutex;
  std::map<RegionName, Mapping> by_name;
};

Mappings& mappings() {
  static auto* const mappings = new Mappings;
  return *mappings;
}

// A number that no other process has. Together with a region's number it names the region on this host.
uint64_t number_of_this_process() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random() | 1;  // never zero
  }();
  return number;
}

// Maps a region of another process, unless it is mapped. Each call needs one drop_mapping(). Throws std::runtime_error
// and FalseRegion.
char* hold_mapping(const RegionName& name, int descriptor, std::size_t bytes, const std::vector<int>& devices) {
  std::lock_guard lock(mappings().mutex);
  auto found = mappings().by_name.find(name);
  if (found == mappings().by_name.end()) {
    Mapping made{map_region(descriptor, bytes, devices), bytes, {devices.begin(), devices.end()}, 0};
    found = mappings().by_name.emplace(name, std::move(made)).first;
  }
  Mapping& mapping = found->second;
  if (mapping.bytes != bytes) throw FalseRegion("it shared a region with another size than before");
  std::vector<int> further;
  for (const int device : devices)
    if (!mapping.users.count(device)) further.push_back(device);
  allow_users(mapping.base, bytes, further);
  mapping.users.insert(further.begin(), further.end());
  ++mapping.holders;
  return mapping.base;
}

void drop_mapping(const RegionName& name) {
  std::lock_guard lock(mappings().mutex);
  const auto found = mappings().by_name.find(name);
  if (--found->second.holders == 0 && unmap_region(found->second.base, found->second.bytes))
    mappings().by_name.erase(found);
}

Note request_of(const Region& region, int rank_index) {
  return {Note::Kind::share, rank_index, number_of_this_process(), region.id, region.bytes};
}

std::string name_of(int process) { return concat("process ", process, " "); }

// The state of the process at the other end of a socket. A forked child may hold the socket open after the process has
// ended. Nothing is known of a process of another PID namespace, which has the number zero here.
const char* state_behind(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.pid <= 0) return "it is alive";
  std::ifstream file(concat("/proc/", peer.pid, "/stat"));  // "number (name) state ..."
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(") ");
  const char state = name_end == std::string::npos ? 'X' : line[name_end + 2];
  if (state == 'T' || state == 't') return "it is stopped";
  return state == 'X' || state == 'Z' ? "it has ended" : "it is alive";
}

}  // namespace

Sharing::Sharing(const Neighbours& neighbours, std::vector<int> devices, Lost lost)
    : processes_(neighbours.processes),
      devices_(std::move(devices)),
      lost_(std::move(lost)),
      timeout_(neighbours.open_timeout) {
  for (const int socket : neighbours.sockets) peers_.push_back({socket >= 0, Outbox(Descriptor(socket)), 0, ""});
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw std::runtime_error("jax_ep: this process has too many files open to create a group");
  thread_ = std::thread([this] { serve(); });
}

Sharing::~Sharing() {
  close();
  unmap();
}

void Sharing::close() {
  {
    std::lock_guard lock(mutex_);
    if (closing_) return;
    closing_ = true;
    wake();
  }
  changed_.notify_all();
  thread_.join();
  std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) peer.outbox.close();
  wake_ = Descriptor();
}

void Sharing::unmap() {
  std::lock_guard lock(mutex_);
  for (const RegionName& name : mapped_) drop_mapping(name);
  mapped_.clear();
  signal_pads_.clear();
}

void Sharing::set_timeout(double seconds) {
  std::lock_guard lock(mutex_);
  timeout_ = std::chrono::duration<double>(seconds);
}

std::vector<char*> Sharing::share(const Region& region, const std::set<int>& processes, int rank_index) {
  std::unique_lock lock(mutex_);
  std::vector<Answer>& answers = shared_.try_emplace(region.id, peers_.size()).first->second;
  for (const int process : processes) {
    if (!peers_[process].other || answers[process].asked) continue;
    answers[process].asked = true;
    push(process, request_of(region, rank_index), region.descriptor);
    if (peers_[process].outbox.waiting()) wake();
  }
  std::vector<char*> bases(peers_.size());
  for (const int process : processes) {
    const Answer& answer = answers[process];
    if (peers_[process].other) await(lock, process, "map this process' memory", [&] { return answer.answered; });
    if (!answer.refusal.empty()) throw GroupException({ErrorKind::other, answer.refusal});
    bases[process] = peers_[process].other ? answer.base : region.base;
  }
  return bases;
}

char* Sharing::await_signal_pad(int process, int rank_index) {
  std::unique_lock lock(mutex_);
  await(lock, process, "share its signal pad", [&] { return signal_pads_.count(rank_index) > 0; });
  return signal_pads_[rank_index];
}

void Sharing::await(std::unique_lock<std::mutex>& lock, int process, const char* doing,
                    const std::function<bool()>& ready) {
  const auto deadline = std::chrono::time_point_cast<std::chrono::nanoseconds>(Clock::now() + timeout_);
  const Peer& peer = peers_[process];
  const bool in_time = changed_.wait_until(lock, deadline, [&] { return ready() || !peer.gone.empty() || closing_; });
  if (ready()) return;
  if (closing_) throw GroupException(closed_too_early());
  if (in_time) throw GroupException({ErrorKind::peer_lost, name_of(process) + peer.gone});
  throw GroupException({ErrorKind::peer_timeout, concat(name_of(process), "did not ", doing, " within ",
                                                        timeout_.count(), " s: ", state_here(process))});
}

// The thread's loop, until this process closes.
void Sharing::serve() {
  name_thread("jax_ep sharing");
  for (;;) {
    listen();
    std::lock_guard lock(mutex_);
    if (closing_) break;
  }
  say_goodbye();
}

// Waits, and reads one message of every peer that has one.
void Sharing::listen() {
  std::vector<pollfd> watched{{wake_.get(), POLLIN, 0}};
  std::vector<int> processes{-1};
  {
    std::lock_guard lock(mutex_);
    for (std::size_t process = 0; process < peers_.size(); ++process) {
      const Peer& peer = peers_[process];
      if (!peer.other || !peer.gone.empty()) continue;
      const int events = (peer.outbox.waiting() < kMaxWaiting ? POLLIN : 0) | (peer.outbox.waiting() ? POLLOUT : 0);
      watched.push_back({peer.outbox.socket(), static_cast<short>(events), 0});
      processes.push_back(static_cast<int>(process));
    }
  }
  if (poll(watched.data(), watched.size(), -1) <= 0) return;
  eventfd_t ignored;
  if (watched[0].revents) eventfd_read(wake_.get(), &ignored);
  for (std::size_t i = 1; i < watched.size(); ++i) {
    if (watched[i].revents & POLLOUT) {
      std::lock_guard lock(mutex_);
      peers_[processes[i]].outbox.flush();
    }
    if (watched[i].revents & ~POLLOUT) attend(processes[i]);
  }
}

void Sharing::attend(int process) {
  const Received received = receive_note(peers_[process].outbox.socket());
  if (received.what == Received::What::nothing) return;
  if (received.what == Received::What::end) return lose(process, "has ended");
  std::string breach = received.breach;
  if (received.what == Received::What::note) {
    std::lock_guard lock(mutex_);
    breach = breach_of(process, received.note);
  }
  if (breach.empty())
    handle(process, received.note, received.descriptor);
  else
    lose(process, kBroke + breach);
}

// Waits no longer than kFarewell for a peer that does not read.
void Sharing::say_goodbye() {
  const Clock::time_point deadline = Clock::now() + kFarewell;
  std::unique_lock lock(mutex_);
  for (std::size_t process = 0; process < peers_.size(); ++process)
    push(static_cast<int>(process), {Note::Kind::goodbye});
  for (;;) {
    std::vector<pollfd> full;
    for (Peer& peer : peers_) {
      peer.outbox.flush();
      if (peer.outbox.waiting()) full.push_back({peer.outbox.socket(), POLLOUT, 0});
    }
    if (full.empty() || Clock::now() >= deadline) return;
    lock.unlock();
    poll(full.data(), full.size(), milliseconds_until(deadline));
    lock.lock();
  }
}

// The caller holds the lock, so notes arrive in the order in which they were pushed.
void Sharing::push(int process, const Note& note, int descriptor) {
  Peer& peer = peers_[process];
  if (peer.outbox.socket() >= 0 && peer.gone.empty()) peer.outbox.push(note, descriptor);
}

void Sharing::wake() { eventfd_write(wake_.get(), 1); }

void Sharing::handle(int process, const Note& note, const Descriptor& descriptor) {
  if (note.kind == Note::Kind::share) return map(process, note, descriptor);
  std::lock_guard lock(mutex_);
  if (note.kind == Note::Kind::goodbye) {
    peers_[process].gone = "has closed the group";
    peers_[process].outbox.clear();
  } else {
    Answer& answer = shared_[note.region][process];
    answer.answered = true;
    if (note.kind == Note::Kind::mapped) answer.base = reinterpret_cast<char*>(note.base);
    if (note.kind == Note::Kind::refused)
      answer.refusal = name_of(process) + "did not map this process' memory: " + note.text;
  }
  changed_.notify_all();
}

void Sharing::map(int process, const Note& request, const Descriptor& descriptor) {
  const RegionName name{request.owner, request.region};
  Note answer = request;
  char* base = nullptr;
  try {
    base = hold_mapping(name, descriptor.get(), request.bytes, devices_);
    answer.kind = Note::Kind::mapped;
    answer.base = reinterpret_cast<uint64_t>(base);
  } catch (const FalseRegion& error) {
    return lose(process, kBroke + error.what());
  } catch (const std::exception& error) {
    answer.kind = Note::Kind::refused;
    std::snprintf(answer.text, sizeof(answer.text), "%s", error.what());
  }
  std::lock_guard lock(mutex_);
  peers_[process].owner = request.owner;
  push(process, answer);  // before a thread of this process sees the signal pad, and may close the group
  if (!base) return;
  mapped_.insert(name);
  if (request.rank_index != kNoRankIndex) signal_pads_[request.rank_index] = base;
  changed_.notify_all();
}

void Sharing::lose(int process, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    peers_[process].gone = why;
    peers_[process].outbox.clear();
    if (closing_) return;
  }
  try {
    lost_(process, why);
  } catch (const std::exception&) {  // then the kernels find out by their deadline
  }
  changed_.notify_all();
}

bool Sharing::lives_at(int rank_index, int process) const {
  if (rank_index < 0 || processes_.empty()) return false;
  const std::size_t size = processes_.front().size(), line = rank_index / size;
  return line < processes_.size() && processes_[line][rank_index % size] == process;
}

// The rule that a note breaks, or nothing.
std::string Sharing::breach_of(int process, const Note& note) const {
  switch (note.kind) {
    case Note::Kind::share:
      return breach_of_share(process, note);
    case Note::Kind::mapped:
    case Note::Kind::refused: {
      const auto found = shared_.find(note.region);
      const bool due = found != shared_.end() && found->second[process].asked && !found->second[process].answered;
      if (!due) return "it answered what it was not asked";
      return note.kind == Note::Kind::mapped && !note.base ? "it mapped memory at address zero" : "";
    }
    case Note::Kind::goodbye:
      break;
  }
  return "";
}

std::string Sharing::breach_of_share(int process, const Note& note) const {
  const uint64_t known = peers_[process].owner;
  if (note.owner == 0 || (known && note.owner != known)) return "it shared memory under a number that is not its own";
  if (note.bytes == 0) return "it shared no memory";
  if (mapped_.count({note.owner, note.region})) return "it shared memory twice";
  if (note.rank_index == kNoRankIndex) return "";
  if (!lives_at(note.rank_index, process)) return "it shared the signal pad of a rank that it does not have";
  if (note.bytes < sizeof(SignalPad))  // a platform may have rounded the size up
    return concat("it shared a signal pad of ", note.bytes, " bytes, not ", sizeof(SignalPad));
  return signal_pads_.count(note.rank_index) ? "it shared the signal pad of a rank twice" : "";
}

std::string Sharing::state_of(int process) const {
  std::lock_guard lock(mutex_);
  return state_here(process);
}

std::string Sharing::state_here(int process) const {
  const Peer& peer = peers_.at(process);
  if (!peer.gone.empty()) return "it " + peer.gone;
  return state_behind(peer.outbox.socket());
}

}  // namespace jax_ep
