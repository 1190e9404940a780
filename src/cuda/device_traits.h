// What the functions that choose kernels and grids know of a device. Host code without CUDA, so
// that the choices for a part can be tested on any machine.
#pragma once

namespace moesaic::cuda {

// Shared memory of one block, on every Hopper part.
inline constexpr int kHopperSharedBytes = 227 * 1024;

struct DeviceTraits {
  int sms = 132;  // multiprocessors
  // Clusters of so many blocks, each block with a multiprocessor of its own, that find room at
  // once: a cluster lies in one GPC, whose number of multiprocessors differs from part to part.
  int clusters_of_4 = 30, clusters_of_8 = 15;
  // Of eight: how many find room whichever GPCs have fewer multiprocessors.
  int sure_clusters_of_8 = 12;
  double l2_bytes_per_us = 8.5e6;  // what L2 delivers to all of them

  // One wave of clusters of 1, 2, 4 or 8 blocks.
  constexpr int clusters_at_once(int blocks) const {
    return blocks == 8 ? clusters_of_8 : blocks == 4 ? clusters_of_4 : sms / blocks;
  }
};

// The defaults are measured on an H100 SXM (132 multiprocessors; an H200 has as many). Of parts
// with fewer, as an H100 PCIe (114), the rest is taken in proportion and rounded down.
constexpr DeviceTraits hopper_traits(int sms) {
  constexpr DeviceTraits kMeasured;
  DeviceTraits t;
  t.sms = sms;
  t.clusters_of_4 = kMeasured.clusters_of_4 * sms / kMeasured.sms;
  t.clusters_of_8 = kMeasured.clusters_of_8 * sms / kMeasured.sms;
  t.sure_clusters_of_8 = kMeasured.sure_clusters_of_8 * sms / kMeasured.sms;
  t.l2_bytes_per_us = kMeasured.l2_bytes_per_us * sms / kMeasured.sms;
  return t;
}

}  // namespace moesaic::cuda
