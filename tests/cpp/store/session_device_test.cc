#include "store/session_device.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/fakes.h"
#include "store/fake_device.h"
#include "store/small_model.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Orders = std::vector<std::pair<StreamId, StreamId>>;

class SessionDeviceTest : public ::testing::Test {
 protected:
  std::shared_ptr<FakeDevice> fake_ = std::make_shared<FakeDevice>(Computes::kByItself);
  SessionDevice device_{fake_};
};

TEST_F(SessionDeviceTest, TheBackendSaysWhatTheDeviceIs) {
  EXPECT_EQ(device_.id().type, 1);
  EXPECT_EQ(device_.id().number, 3);
  EXPECT_TRUE(device_.computes_by_itself());
  EXPECT_TRUE(device_.kernels().has("adam"));
  EXPECT_FALSE(SessionDevice(std::make_shared<FakeDevice>()).computes_by_itself());
}

TEST_F(SessionDeviceTest, TheStreamBeginsWithTheThreadsCurrentOne) {
  fake_->set_stream(StreamId{4});
  const SessionDevice device(fake_);
  EXPECT_EQ(device.stream()->id(), StreamId{4});
  EXPECT_EQ(device_.stream()->id(), StreamId{});
  EXPECT_EQ(device_.current_stream(), StreamId{4});
}

TEST_F(SessionDeviceTest, FollowingAnotherStreamOrdersItBehindTheLast) {
  fake_->set_stream(StreamId{7});
  device_.follow_stream();
  device_.follow_stream();  // it is there
  EXPECT_EQ(device_.stream()->id(), StreamId{7});
  EXPECT_EQ(fake_->orders(), (Orders{{StreamId{}, StreamId{7}}}));
}

TEST_F(SessionDeviceTest, AStreamThatCannotBeOrderedIsNotFollowed) {
  fake_->set_stream(StreamId{7});
  fake_->fail_next();
  EXPECT_THROW(device_.follow_stream(), InjectedFailure);
  EXPECT_EQ(device_.stream()->id(), StreamId{});
  device_.follow_stream();
  EXPECT_EQ(device_.stream()->id(), StreamId{7});
}

TEST_F(SessionDeviceTest, AwaitIsBehindTheThreadsOwnStream) {
  fake_->set_stream(StreamId{7});
  device_.await();
  EXPECT_EQ(fake_->fences(), std::vector<StreamId>{StreamId{7}});
}

TEST_F(SessionDeviceTest, OperatorsRunOnTheSessionsStreamWhileTheScopeLives) {
  fake_->set_stream(StreamId{7});
  {
    const auto scope = device_.run_on_stream();
    EXPECT_EQ(device_.current_stream(), StreamId{});
  }
  EXPECT_EQ(device_.current_stream(), StreamId{7});
}

TEST_F(SessionDeviceTest, LeavingWaitsForTheStreamAndForEachPayload) {
  const auto host = std::make_shared<MemoryTier>(TierKind::kHost, 1024, fake_->make_host_arena());
  const std::vector<std::shared_ptr<Payload>> payloads = {std::make_shared<Payload>(host, 64, ""),
                                                          std::make_shared<Payload>(host, 64, "")};
  fake_->set_stream(StreamId{7});
  device_.leave(payloads);
  EXPECT_EQ(fake_->fences(), std::vector<StreamId>{StreamId{}});  // the session's
  EXPECT_EQ(fake_->written_by_host(),
            (std::vector<const std::byte*>{payloads[0]->data(), payloads[1]->data()}));
}

TEST_F(SessionDeviceTest, LeavingALostDeviceThrowsNothing) {
  fake_->fail_next();
  device_.leave({});
  EXPECT_TRUE(fake_->fences().empty());
}

TEST_F(SessionDeviceTest, AChunkIsHeldWhereItsParametersAreOnADeviceThatComputes) {
  for (const Computes computes : {Computes::kOnHost, Computes::kByItself}) {
    const bool by_itself = computes == Computes::kByItself;
    const TestStore store(
        SmallModel::row(2, 16).layout(64),
        {.placements = {Placement::kDevice, Placement::kStream}, .device = computes});
    EXPECT_EQ(store.device.holds(*store.manager, chunk_id(0)), by_itself);
    EXPECT_FALSE(store.device.holds(*store.manager, chunk_id(1)));
    ASSERT_TRUE(store.manager->try_promote(chunk_id(1)));
    EXPECT_EQ(store.device.holds(*store.manager, chunk_id(1)), by_itself);
    store.manager->demote(chunk_id(1));
    EXPECT_FALSE(store.device.holds(*store.manager, chunk_id(1)));
  }
}

TEST_F(SessionDeviceTest, ThreadsOnDifferentStreamsLeaveOneBehindAllOthers) {
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t i = 1; i <= 4; ++i) {
      threads.emplace_back([this, i] { device_.stream()->move_to(StreamId{i}); });
    }
  }
  const Orders orders = fake_->orders();
  ASSERT_EQ(orders.size(), 4U);
  EXPECT_EQ(orders.front().first, StreamId{});
  for (std::size_t i = 1; i < orders.size(); ++i) {
    EXPECT_EQ(orders[i].first, orders[i - 1].second);
  }
  EXPECT_EQ(device_.stream()->id(), orders.back().second);
}

}  // namespace
}  // namespace castor::testing
