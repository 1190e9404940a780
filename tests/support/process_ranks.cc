#include "support/process_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "parallel/transport.h"

extern char** environ;

namespace moesaic::test {
namespace {

using parallel::Message;

constexpr const char* kPlace = "MOESAIC_TEST_RANK";
constexpr const char* kTask = "MOESAIC_TEST_TASK";

// Frames of tag, size and bytes over a stream socket to each rank. What is sent to a process that is
// gone is lost, and nothing comes from it.
class SocketTransport final : public parallel::Transport {
 public:
  SocketTransport(int rank, std::vector<int> sockets)
      : rank_(rank), sockets_(std::move(sockets)), links_(sockets_.size()) {}

  std::string_view name() const override { return "sockets"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(sockets_.size()); }
  Status post(int to, int tag, Message message) override {
    const Header header{tag, static_cast<std::int64_t>(message.size())};
    std::vector<std::byte>& out = link(to).out;
    const auto* const bytes = reinterpret_cast<const std::byte*>(&header);
    out.insert(out.end(), bytes, bytes + sizeof(header));
    out.insert(out.end(), message.begin(), message.end());
    flush(to);
    return {};
  }
  Result<std::optional<Message>> poll(int from, int tag) override {
    for (int r = 0; r < size(); ++r) flush(r);
    receive(from);
    std::deque<Message>& there = link(from).arrived[tag];
    if (there.empty()) return std::optional<Message>();
    std::optional<Message> first = std::move(there.front());
    there.pop_front();
    return first;
  }
  Result<bool> all_sent() override {
    bool all = true;
    for (int r = 0; r < size(); ++r) {
      flush(r);
      all = all && link(r).out.empty();
    }
    return all;
  }

 private:
  struct Header {
    std::int64_t tag, bytes;
  };
  struct Link {
    std::vector<std::byte> out, in;
    std::map<std::int64_t, std::deque<Message>> arrived;
  };
  Link& link(int rank) { return links_[static_cast<std::size_t>(rank)]; }
  int socket(int rank) const { return sockets_[static_cast<std::size_t>(rank)]; }

  void flush(int to) {
    std::vector<std::byte>& out = link(to).out;
    if (to == rank_) {
      link(to).in.insert(link(to).in.end(), out.begin(), out.end());
      out.clear();
      return;
    }
    while (!out.empty()) {
      const ssize_t sent = ::send(socket(to), out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
      out.erase(out.begin(), sent < 0 ? out.end() : out.begin() + sent);
    }
  }
  void receive(int from) {
    Link& l = link(from);
    std::byte buffer[1 << 16];
    while (from != rank_) {
      const ssize_t got = ::recv(socket(from), buffer, sizeof(buffer), MSG_DONTWAIT);
      if (got <= 0) break;
      l.in.insert(l.in.end(), buffer, buffer + got);
    }
    for (Header header{}; l.in.size() >= sizeof(header);) {
      std::memcpy(&header, l.in.data(), sizeof(header));
      const auto bytes = static_cast<std::size_t>(header.bytes);
      if (l.in.size() < sizeof(header) + bytes) return;
      Message m = pool().take(bytes);
      const auto begin = l.in.begin() + sizeof(header);
      std::copy_n(begin, bytes, m.begin());
      l.arrived[header.tag].push_back(std::move(m));
      l.in.erase(l.in.begin(), begin + static_cast<std::ptrdiff_t>(bytes));
    }
  }

  int rank_;
  std::vector<int> sockets_;
  std::vector<Link> links_;
};

}  // namespace

std::optional<StartedRank> started_rank() {
  const char* const place = std::getenv(kPlace);
  if (place == nullptr) return std::nullopt;
  std::istringstream text(place);
  int rank = 0, size = 0;
  StartedRank started;
  CommunicatorOptions options;
  text >> rank >> size >> options.timeout_ms >> started.parent;
  std::vector<int> sockets(static_cast<std::size_t>(size));
  for (int& s : sockets) text >> s;
  started.task = std::getenv(kTask);
  started.world = parallel::make_group_communicator(
      std::make_unique<SocketTransport>(rank, std::move(sockets)), options);
  return started;
}

void StartedRank::ready() const {
  const char byte = 'r';
  if (::write(parent, &byte, 1) != 1) std::abort();
}

RankProcesses::RankProcesses(const std::string& task, int ranks, int timeout_ms)
    : processes_(static_cast<std::size_t>(ranks)) {
  const auto n = static_cast<std::size_t>(ranks);
  // sockets[i][j]: the end of rank i towards rank j.
  std::vector<std::vector<int>> sockets(n, std::vector<int>(n, -1));
  std::vector<int> to_parent(n, -1);
  for (std::size_t i = 0; i < n; ++i) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
    processes_[i].from = pair[0];
    to_parent[i] = pair[1];
    for (std::size_t j = 0; j < i; ++j) {
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
      sockets[i][j] = pair[0];
      sockets[j][i] = pair[1];
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    std::ostringstream place;
    place << kPlace << '=' << i << ' ' << n << ' ' << timeout_ms << ' ' << to_parent[i];
    for (const int s : sockets[i]) place << ' ' << s;
    const std::string text = place.str(), what = std::string(kTask) + '=' + task;
    std::vector<const char*> env;
    for (char** e = environ; *e != nullptr; ++e) env.push_back(*e);
    env.insert(env.end(), {text.c_str(), what.c_str(), nullptr});
    const char* const argv[] = {"rank", nullptr};
    const pid_t pid = ::fork();
    if (pid == 0) {
      // Only what is allowed between fork and exec.
      for (const int s : sockets[i]) ::fcntl(s, F_SETFD, 0);
      ::fcntl(to_parent[i], F_SETFD, 0);
      ::execve("/proc/self/exe", const_cast<char**>(argv), const_cast<char**>(env.data()));
      ::_exit(127);
    }
    processes_[i].pid = pid;
  }
  for (std::size_t i = 0; i < n; ++i) {
    ::close(to_parent[i]);
    for (const int s : sockets[i]) {
      if (s >= 0) ::close(s);
    }
  }
}

RankProcesses::~RankProcesses() {
  for (std::size_t r = 0; r < processes_.size(); ++r) {
    kill(static_cast<int>(r));
    join(static_cast<int>(r), 60);
    ::close(processes_[r].from);
  }
}

bool RankProcesses::await_all(int seconds) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  for (const Process& p : processes_) {
    pollfd fd{p.from, POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    char byte = 0;
    if (::poll(&fd, 1, std::max(0, static_cast<int>(left.count()))) != 1) return false;
    if (::read(p.from, &byte, 1) != 1) return false;
  }
  return true;
}

void RankProcesses::kill(int rank) {
  const pid_t pid = processes_[static_cast<std::size_t>(rank)].pid;
  if (pid > 0) ::kill(pid, SIGKILL);
}

int RankProcesses::join(int rank, int seconds) {
  Process& p = processes_[static_cast<std::size_t>(rank)];
  if (p.pid <= 0) return -1;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  for (int status = 0;;) {
    const pid_t done = ::waitpid(p.pid, &status, WNOHANG);
    if (done == p.pid) {
      p.pid = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    if (done < 0) return -1;
    if (std::chrono::steady_clock::now() > end) return -2;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace moesaic::test
