// A stream beside that of a call, for work that may run at the same time.
#pragma once

#include <array>

#include "moesaic/status.h"

namespace moesaic::cuda {

// Fork and join are events, so that both streams can be captured into one graph. One call at a time.
class SideStream {
 public:
  SideStream() = default;
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream();
  // Of the current device. Once. priority: as the runtime has it, 0 or less.
  Status create(int priority = 0);
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

// Side streams of one device for calls on streams of any priority: the one beside a stream has the same.
// Of two kernels whose blocks wait for blocks of their own, one on a stream of higher priority would get
// multiprocessors that the other, which has some already, needs to end.
class SideStreams {
 public:
  // On the current device: that of streams without a priority. Others are made when they are first asked
  // for.
  Status create() { return of_[0].create(); }
  // Valid as long as this. Capturable. One call at a time.
  Result<SideStream*> beside(void* stream);

 private:
  std::array<SideStream, 16> of_;  // by -priority; devices have six
};

}  // namespace moesaic::cuda
