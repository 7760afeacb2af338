#include "heap/note.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace jax_ep {
namespace {

// The headers of a message with room for one descriptor.
struct Envelope {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec body;
  msghdr header{};

  explicit Envelope(Note* note) : body{note, sizeof(Note)} {
    header.msg_iov = &body;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
};

}  // namespace

bool send_note(int socket, const Note& note, int descriptor) {
  Note copy = note;
  Envelope envelope(&copy);
  if (descriptor < 0) {
    envelope.header.msg_controllen = 0;
  } else {
    cmsghdr* attached = CMSG_FIRSTHDR(&envelope.header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(attached), &descriptor, sizeof(int));
  }
  ssize_t sent;
  do sent = sendmsg(socket, &envelope.header, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(sizeof(Note));
}

bool receive_note(int socket, Note* note, int* descriptor) {
  Envelope envelope(note);
  *descriptor = -1;
  ssize_t received;
  do received = recvmsg(socket, &envelope.header, MSG_CMSG_CLOEXEC);
  while (received < 0 && errno == EINTR);
  const cmsghdr* attached = received > 0 ? CMSG_FIRSTHDR(&envelope.header) : nullptr;
  if (attached && attached->cmsg_type == SCM_RIGHTS) std::memcpy(descriptor, CMSG_DATA(attached), sizeof(int));
  return received == static_cast<ssize_t>(sizeof(Note));
}

}  // namespace jax_ep
