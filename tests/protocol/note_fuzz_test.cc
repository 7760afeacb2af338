// What a process may be sent by one that has lost its mind: every rule of the notes broken once, then random messages.
// It fails the group with the reason, and never crashes, hangs or keeps a descriptor. JAX_EP_TEST_SEED repeats them.
#include <fcntl.h>
#include <sys/mman.h>

#include <cstring>
#include <future>
#include <random>

#include "ranks.h"

namespace jax_ep {
namespace {

constexpr std::size_t kBytes = sizeof(SignalPad);  // of all regions
constexpr uint64_t kOwner = 77;
constexpr double kPatience = 0.02;  // seconds
const std::vector<std::vector<int>> kLine{{0, 1}};

int open_descriptors() { return count_entries("/proc/self/fd"); }

enum class File { sealed, growing, short_one, pipe };

Descriptor make_file(File kind) {
  if (kind == File::pipe) {
    int ends[2];
    expect(pipe(ends) == 0, "a pipe is made");
    close(ends[1]);
    return Descriptor(ends[0]);
  }
  Descriptor file(memfd_create("fuzz", MFD_ALLOW_SEALING));
  expect(ftruncate(file.get(), kind == File::short_one ? 16 : kBytes) == 0, "a file is made");
  if (kind != File::growing) fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK);
  return file;
}

// Sends any bytes with any descriptors; what the other end thinks of it is not our concern.
void send_raw(int socket, const void* bytes, std::size_t size, const std::vector<int>& descriptors) {
  std::vector<char> control(CMSG_SPACE(sizeof(int) * descriptors.size()));
  iovec body{const_cast<void*>(bytes), size};
  msghdr header{};
  header.msg_iov = &body;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* attached = CMSG_FIRSTHDR(&header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::memcpy(CMSG_DATA(attached), descriptors.data(), sizeof(int) * descriptors.size());
  }
  sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Note share_of(int rank_index, uint64_t bytes = kBytes, uint64_t owner = kOwner) {
  static uint64_t region = 0;
  return {Note::Kind::share, rank_index, owner, ++region, bytes};
}

// A process whose peer is this test, at the other end of a raw socket.
class Victim {
 public:
  Victim() : Victim(socket_pair()) {}

  int socket() const { return socket_.get(); }
  void hang_up() { socket_ = Descriptor(); }
  Sharing& sharing() { return *sharing_; }
  void send(const Note& note, const std::vector<int>& descriptors = {}) {
    send_raw(socket(), &note, sizeof(note), descriptors);
  }
  // Why the peer was given up; waits for it.
  std::string why() {
    auto reason = reason_.get_future();
    expect(reason.wait_for(std::chrono::seconds(10)) == std::future_status::ready, "a breach is noticed");
    return reason.get();
  }

 private:
  explicit Victim(std::array<int, 2> sockets) : socket_(sockets[0]) {
    const auto lose = [this](int process, const std::string& why) {
      expect(process == 1 && !lost_, "a peer is given up once");
      lost_ = true;
      reason_.set_value(why);
    };
    sharing_ = std::make_unique<Sharing>(Neighbours{kLine, {-1, sockets[1]}, kPatience}, std::vector{0}, lose);
  }

  Descriptor socket_;
  bool lost_ = false;
  std::promise<std::string> reason_;
  std::unique_ptr<Sharing> sharing_;
};

void expect_breach(const char* rule, const std::function<void(Victim&)>& break_it) {
  const int before = open_descriptors();
  {
    Victim victim;
    break_it(victim);
    const std::string why = victim.why();
    INFO(why);
    expect(why.find("broke the protocol: ") == 0 && why.find(rule) != std::string::npos, rule);
    const auto region = allocate_region(0, kBytes, {0});
    expect(kind_of_error([&] { victim.sharing().share(*region, {1}); }) == "PeerLostError",
           "who breaks a rule is lost");
    victim.sharing().close();
  }
  expect(open_descriptors() == before, "a breach leaves no descriptor");
}

struct Message {
  Note note;
  std::vector<int> descriptors = {};
};
void expect_breach_by(const char* rule, const std::vector<Message>& messages) {
  expect_breach(rule, [&](Victim& v) {
    for (const Message& each : messages) v.send(each.note, each.descriptors);
  });
}

TEST_CASE("every rule of the notes that is broken is named") {
  const Descriptor file = make_file(File::sealed);
  const int fd = file.get();
  expect_breach("no note", [](Victim& v) { send_raw(v.socket(), "hello", 5, {}); });
  expect_breach("no note", [&](Victim& v) { send_raw(v.socket(), "hello", 5, {fd, fd}); });
  expect_breach("no note", [](Victim& v) { send_raw(v.socket(), std::vector<char>(1000).data(), 1000, {}); });
  expect_breach_by("unknown kind 9", {{Note{static_cast<Note::Kind>(9)}}});
  expect_breach_by("unknown kind -1", {{Note{static_cast<Note::Kind>(-1)}}});
  expect_breach_by("with 0 descriptors, not 1", {{share_of(1)}});
  expect_breach_by("with 2 descriptors, not 1", {{share_of(1), {fd, fd}}});
  expect_breach_by("with 253 descriptors", {{share_of(1), std::vector<int>(253, fd)}});
  expect_breach_by("with 1 descriptors, not 0", {{Note{Note::Kind::goodbye}, {fd}}});
  Note endless{Note::Kind::refused};
  std::memset(endless.text, 'x', sizeof(endless.text));
  expect_breach_by("a text without an end", {{endless}});
  for (const int rank_index : {0, 2, -2, 1 << 30})
    expect_breach_by("a rank that it does not have", {{share_of(rank_index), {fd}}});
  expect_breach_by("the signal pad of a rank twice", {{share_of(1), {fd}}, {share_of(1), {fd}}});
  const Note once = share_of(-1);
  expect_breach_by("memory twice", {{once, {fd}}, {once, {fd}}});
  expect_breach_by("not its own", {{share_of(-1), {fd}}, {share_of(-1, kBytes, kOwner + 1), {fd}}});
  expect_breach_by("no memory", {{share_of(1, /*bytes=*/0), {fd}}});
  const Descriptor small = make_file(File::short_one);
  expect_breach_by("a signal pad of 16 bytes", {{share_of(1, /*bytes=*/16), {small.get()}}});
  for (const File kind : {File::short_one, File::pipe, File::growing}) {
    const Descriptor wrong = make_file(kind);
    expect_breach_by("it shared memory", {{share_of(1), {wrong.get()}}});
  }
  expect_breach_by("what it was not asked", {{Note{Note::Kind::mapped}}});
  const auto region = allocate_region(0, kBytes, {0});
  const auto expect_answers = [&](const char* rule, const std::vector<uint64_t>& bases) {
    expect_breach(rule, [&](Victim& v) {
      kind_of_error([&] { v.sharing().share(*region, {1}); });
      for (const uint64_t base : bases) v.send({Note::Kind::mapped, -1, 0, region->id, 0, base, /*text=*/{}});
    });
  };
  expect_answers("at address zero", {0});
  expect_answers("what it was not asked", {4096, 4096});
}

// One random message, mostly nearly right.
void send_something(Victim& victim, std::mt19937& random, uint64_t asked) {
  const auto draw = [&](int below) { return static_cast<int>(random() % below); };
  Note note = share_of(draw(4) - 1);
  if (draw(3)) note = {static_cast<Note::Kind>(draw(5) - draw(2)), draw(3) - 1};
  note.region = draw(3) ? note.region : asked;
  note.base = draw(4) ? 4096 : 0;
  for (int flips = draw(4) ? 0 : draw(8); flips > 0; --flips)
    reinterpret_cast<unsigned char*>(&note)[draw(sizeof(note))] ^= static_cast<unsigned char>(1 << draw(8));
  if (note.kind == Note::Kind::share && note.bytes != kBytes && draw(2)) note.bytes = kBytes;
  std::vector<Descriptor> files;
  std::vector<int> numbers;
  const bool wants_one = note.kind == Note::Kind::share;
  for (int count = draw(5) ? wants_one : draw(4); count > 0; --count) {
    files.push_back(make_file(draw(6) ? File::sealed : static_cast<File>(draw(4))));
    numbers.push_back(files.back().get());
  }
  char large[2 * sizeof(Note)] = {};
  std::memcpy(large, &note, sizeof(note));
  send_raw(victim.socket(), large, draw(8) ? sizeof(note) : draw(sizeof(large)), numbers);
}

void one_life(std::mt19937& random) {
  const auto region = allocate_region(0, kBytes, {0});
  Victim victim;
  auto asking = std::async(std::launch::async, [&] {
    kind_of_error([&] { victim.sharing().share(*region, {1}); });
    kind_of_error([&] { victim.sharing().await_signal_pad(1, 1); });
    victim.sharing().state_of(1);
  });
  for (int messages = static_cast<int>(random() % 6); messages > 0; --messages)
    send_something(victim, random, region->id);
  if (random() % 3 == 0) shutdown(victim.socket(), static_cast<int>(random() % 3));
  if (random() % 3 == 0) victim.hang_up();
  if (random() % 4 == 0) victim.sharing().close();
  asking.wait();
}

TEST_CASE("random messages neither crash nor hang a process nor leave a descriptor") {
  const char* given = std::getenv("JAX_EP_TEST_SEED");
  const unsigned seed = given ? static_cast<unsigned>(std::atoi(given)) : std::random_device{}();
  INFO("JAX_EP_TEST_SEED=", seed);
  std::mt19937 random(seed);
  const int before = open_descriptors();
  const auto start = std::chrono::steady_clock::now();
  int lives = 0;
  for (; std::chrono::steady_clock::now() - start < std::chrono::seconds(4); ++lives) {
    const auto born = std::chrono::steady_clock::now();
    one_life(random);
    expect(std::chrono::steady_clock::now() - born < std::chrono::seconds(5), "no message makes it hang");
    expect(open_descriptors() == before, "no message leaves a descriptor");
  }
  MESSAGE(lives, " processes were told nonsense");
}

}  // namespace
}  // namespace jax_ep
