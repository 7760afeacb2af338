#include "heap/message.h"

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

  explicit Envelope(Message* message) : body{message, sizeof(Message)} {
    header.msg_iov = &body;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
};

}  // namespace

bool send_message(int socket, const Message& message, int descriptor) {
  Message copy = message;
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
  return sent == static_cast<ssize_t>(sizeof(Message));
}

bool receive_message(int socket, Message* message, int* descriptor) {
  Envelope envelope(message);
  *descriptor = -1;
  ssize_t received;
  do received = recvmsg(socket, &envelope.header, MSG_CMSG_CLOEXEC);
  while (received < 0 && errno == EINTR);
  const cmsghdr* attached = received > 0 ? CMSG_FIRSTHDR(&envelope.header) : nullptr;
  if (attached && attached->cmsg_type == SCM_RIGHTS) std::memcpy(descriptor, CMSG_DATA(attached), sizeof(int));
  return received == static_cast<ssize_t>(sizeof(Message));
}

}  // namespace jax_ep
