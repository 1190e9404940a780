// A stream beside that of a call, for work that may run at the same time.
#pragma once

#include "moesaic/status.h"

namespace moesaic::cuda {

// Fork and join are events, so that both streams can be captured into one graph. One call at a time.
class SideStream {
 public:
  SideStream() = default;
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream();
  // Of the current device. Once.
  Status create();
  // Work that is put on handle() from now on comes after what is on `stream`.
  Status fork(void* stream);
  // Work that is put on `stream` from now on comes after what is on handle().
  Status join(void* stream);
  void* handle() const { return stream_; }

 private:
  void* stream_ = nullptr;
  void* forked_ = nullptr;  // events
  void* joined_ = nullptr;
  int device_ = 0;
};

}  // namespace moesaic::cuda
