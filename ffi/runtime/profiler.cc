#include "runtime/profiler.h"

#include <exception>

namespace jax_ep {
namespace {

// Bounds of the length of a track's ring, in events. A CPU has few tracks, so their rings are long.
constexpr std::size_t kShortestRing = 4096, kLongestRing = 32768;
constexpr std::size_t kRankEvents = 1 << 20;

std::size_t ring_length(std::size_t tracks) {
  std::size_t length = kLongestRing;
  while (length > kShortestRing && length * tracks > kRankEvents) length /= 2;
  return length;
}

void switch_to(int device, uint64_t* word, const Timeline* timeline) {
  const uint64_t address = reinterpret_cast<uintptr_t>(timeline);
  copy_array(device, word, &address, 1);
}

Phase phase_of(const Event& event) { return static_cast<Phase>(event.what & ((1 << kOpBit) - 1)); }
OpKind op_of(const Event& event) { return static_cast<OpKind>(event.what >> kOpBit & 0xff); }

// The events of a track from number `first` on, out of its ring.
std::vector<Event> read_events(int device, const Track& track, uint64_t first) {
  std::vector<Event> events(track.count - first);
  for (uint64_t at = first; at < track.count;) {
    const uint64_t begin = at & track.mask, length = std::min(track.count - at, track.mask + 1 - begin);
    copy_array<Event>(device, &events[at - first], track.events + begin, length);
    at += length;
  }
  return events;
}

}  // namespace

const char* name_of(Phase phase) {
  static constexpr const char* kNames[] = {"none",   "poison", "count",   "post",   "wait",
                                           "layout", "place",  "barrier", "send",   "pad",
                                           "expand", "reduce", "give up", "arrive", "multiply"};
  return kNames[static_cast<int>(phase)];
}

Profiler::Profiler(std::shared_ptr<Group> group, int ctas, const Products& products)
    : group_(std::move(group)), ctas_(ctas) {
  for (int line = 0; line < group_->line_count(); ++line)
    for (int rank = 0; rank < group_->size(); ++rank)
      if (group_->is_local({line, rank})) add_rank({line, rank}, products);
}

Profiler::~Profiler() {
  try {
    for (const Rank& rank : ranks_) switch_products(rank, &rank.timelines[1], nullptr);
  } catch (const std::exception&) {  // the device is gone
  }
}

void Profiler::add_rank(RankId rank_id, const Products& products) {
  const int device = group_->device_of(rank_id);
  std::vector<uint64_t*> words;
  if (products.timelines) words = products.timelines(device);
  const std::size_t product_ctas = words.empty() ? 0 : products.ctas;
  const std::size_t of_ops = ctas_ * kTrackRoles, tracks = of_ops + product_ctas, ring = ring_length(of_ops);
  const auto allocate = [&](std::size_t bytes) {
    std::shared_ptr<void> memory = allocate_on_device(device, bytes, group_->id());
    group_->keep(memory);
    return memory.get();
  };
  Rank rank{rank_id, device, group_->signal_pad(rank_id), std::move(words), tracks, nullptr, nullptr, {}, {}};
  rank.timelines = static_cast<Timeline*>(allocate(2 * sizeof(Timeline)));
  rank.tracks = static_cast<Track*>(allocate(tracks * sizeof(Track)));
  auto* const events = static_cast<Event*>(allocate(tracks * ring * sizeof(Event)));
  std::vector<Track> empty;
  for (std::size_t i = 0; i < tracks; ++i) empty.push_back({0, ring - 1, events + i * ring});
  copy_array<Track>(device, rank.tracks, empty.data(), tracks);
  const Timeline timelines[] = {{ctas_, rank.tracks}, {product_ctas, rank.tracks + of_ops}};
  copy_array(device, rank.timelines, timelines, 2);
  ranks_.push_back(std::move(rank));
}

std::vector<Track> Profiler::read_tracks(const Rank& rank) const {
  std::vector<Track> tracks(rank.track_count);
  copy_array<Track>(rank.device, tracks.data(), rank.tracks, tracks.size());
  return tracks;
}

void Profiler::start() {
  for (Rank& rank : ranks_) {
    rank.begin = read_clock(rank.device);
    rank.seen.clear();
    for (const Track& track : read_tracks(rank)) rank.seen.push_back(track.count);
  }
  for (const Rank& rank : ranks_) {
    switch_to(rank.device, &rank.signal_pad->timeline, &rank.timelines[0]);
    switch_products(rank, nullptr, &rank.timelines[1]);
  }
}

std::vector<RankProfile> Profiler::stop() {
  for (const Rank& rank : ranks_) {
    switch_to(rank.device, &rank.signal_pad->timeline, nullptr);
    switch_products(rank, &rank.timelines[1], nullptr);
  }
  std::vector<RankProfile> profiles;
  for (const Rank& rank : ranks_) profiles.push_back(read(rank));
  return profiles;
}

// Where another timeline than `from` is in use, it remains.
void Profiler::switch_products(const Rank& rank, const Timeline* from, const Timeline* to) {
  for (uint64_t* const word : rank.products) {
    uint64_t now = 0;
    copy_array<uint64_t>(rank.device, &now, word, 1);
    if (now == reinterpret_cast<uintptr_t>(from)) switch_to(rank.device, word, to);
  }
}

std::optional<Moment> Profiler::last_of(RankId rank_id) const {
  for (const Rank& rank : ranks_) {
    if (rank.rank_id.line != rank_id.line || rank.rank_id.rank != rank_id.rank) continue;
    Track track;
    copy_array(rank.device, &track, rank.tracks, 1);
    if (track.count == 0) return std::nullopt;
    Event event;
    copy_array<Event>(rank.device, &event, track.events + ((track.count - 1) & track.mask), 1);
    return Moment{op_of(event), phase_of(event)};
  }
  return std::nullopt;
}

RankProfile Profiler::read(const Rank& rank) const {
  const HostClock clock(rank.begin, read_clock(rank.device));
  RankProfile profile{rank.rank_id, {}, 0, 0};
  const std::vector<Track> tracks = read_tracks(rank);
  const std::size_t of_ops = ctas_ * kTrackRoles;
  for (std::size_t i = 0; i < tracks.size(); ++i) {
    const bool is_product = i >= of_ops;
    const int cta = static_cast<int>(is_product ? i - of_ops : i / kTrackRoles);
    const int role = is_product ? kProductRole : static_cast<int>(i % kTrackRoles);
    const uint64_t length = tracks[i].mask + 1, count = tracks[i].count;
    const uint64_t first = count - std::min(count - rank.seen[i], length);
    const std::vector<Event> events = read_events(rank.device, tracks[i], first);
    std::size_t at = 0;
    if (first > rank.seen[i])  // the rest of an op that was partly overwritten is useless
      while (at < events.size() && phase_of(events[at]) != Phase::none) ++at;
    profile.lost += first - rank.seen[i] + at;
    for (; at + 1 < events.size(); ++at) {
      const Event &event = events[at], &next = events[at + 1];
      if (phase_of(event) == Phase::none || (is_product && phase_of(next) == Phase::none)) continue;
      // A coop that goes on with a phase may enter it again. But two waits may be for different ranks.
      const bool goes_on = at > 0 && events[at - 1].what == event.what;
      if (goes_on && !is_product && phase_of(event) != Phase::wait) {
        profile.spans.back().end_ns = clock.of(next.ns);
        continue;
      }
      profile.spans.push_back(
          {cta, role, event.what >> kEpochBit, op_of(event), phase_of(event), clock.of(event.ns), clock.of(next.ns)});
    }
    profile.unfinished += !events.empty() && phase_of(events.back()) != Phase::none;
  }
  return profile;
}

}  // namespace jax_ep
