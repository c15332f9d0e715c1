"""The message classes of ``wire/protos``, in a descriptor pool of their own.

Not the default pool: the full names are XLA's, and a package in the same process that registers XLA's own files
(TensorFlow does) would clash with ours.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from pathways_runtime.wire.gen.ifrt_descriptors import FILE_DESCRIPTOR_SET

__all__ = ["POOL", "DecodeError", "files", "message_class"]

#: The gRPC service; a method's path is ``/<SERVICE>/<method>``.
SERVICE = "xla.ifrt.proxy.GrpcIfrtService"

POOL = descriptor_pool.DescriptorPool()


def files() -> list[descriptor_pb2.FileDescriptorProto]:
    """The descriptors of our .proto files, each after those that it imports."""
    return list(descriptor_pb2.FileDescriptorSet.FromString(FILE_DESCRIPTOR_SET).file)


for _file in files():
    POOL.Add(_file)


def message_class(full_name: str) -> Any:
    """The class of a message, e.g. ``message_class("xla.OpSharding")``.

    Raises:
        KeyError: no .proto file of ours has such a message.
    """
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full_name))


StatusProto: Any = message_class("tensorflow.StatusProto")

CompileOptionsProto: Any = message_class("xla.CompileOptionsProto")
CompiledMemoryStatsProto: Any = message_class("xla.CompiledMemoryStatsProto")
DeviceAssignmentProto: Any = message_class("xla.DeviceAssignmentProto")
OpSharding: Any = message_class("xla.OpSharding")
XlaLayoutProto: Any = message_class("xla.LayoutProto")

ArraySpecProto: Any = message_class("xla.ifrt.ArraySpecProto")
AttributeMapProto: Any = message_class("xla.ifrt.AttributeMapProto")
CompactLayoutProto: Any = message_class("xla.ifrt.CompactLayoutProto")
ConcreteEvenShardingProto: Any = message_class("xla.ifrt.ConcreteEvenShardingProto")
CustomCallProgramProto: Any = message_class("xla.ifrt.CustomCallProgramProto")
DTypeProto: Any = message_class("xla.ifrt.DTypeProto")
HloShardingProto: Any = message_class("xla.ifrt.HloShardingProto")
LayoutProto: Any = message_class("xla.ifrt.LayoutProto")
PjRtLayoutProto: Any = message_class("xla.ifrt.PjRtLayoutProto")
RemapPlanProto: Any = message_class("xla.ifrt.RemapPlanProto")
ShapeProto: Any = message_class("xla.ifrt.ShapeProto")
ShardingProto: Any = message_class("xla.ifrt.ShardingProto")
SingleDeviceShardingProto: Any = message_class("xla.ifrt.SingleDeviceShardingProto")
XlaCompileOptionsProto: Any = message_class("xla.ifrt.XlaCompileOptionsProto")

ByteStrides: Any = message_class("xla.ifrt.proto.ByteStrides")
StringArrayContents: Any = message_class("xla.ifrt.proto.StringArrayContents")

IfrtRequest: Any = message_class("xla.ifrt.proxy.IfrtRequest")
IfrtResponse: Any = message_class("xla.ifrt.proxy.IfrtResponse")
InitResponse: Any = message_class("xla.ifrt.proxy.InitResponse")

GetVersionRequest: Any = message_class("xla.ifrt.proxy.GrpcGetVersionRequest")
GetVersionResponse: Any = message_class("xla.ifrt.proxy.GrpcGetVersionResponse")
SessionMetadata: Any = message_class("xla.ifrt.proxy.GrpcIfrtSessionMetadata")
HostBufferStoreMetadata: Any = message_class("xla.ifrt.proxy.GrpcHostBufferStoreMetadata")
HostBufferStoreRequest: Any = message_class("xla.ifrt.proxy.GrpcHostBufferStoreRequest")
HostBufferStoreResponse: Any = message_class("xla.ifrt.proxy.GrpcHostBufferStoreResponse")
HostBufferLookupRequest: Any = message_class("xla.ifrt.proxy.GrpcHostBufferLookupRequest")
HostBufferLookupResponse: Any = message_class("xla.ifrt.proxy.GrpcHostBufferLookupResponse")
HostBufferDeleteRequest: Any = message_class("xla.ifrt.proxy.GrpcHostBufferDeleteRequest")
HostBufferDeleteResponse: Any = message_class("xla.ifrt.proxy.GrpcHostBufferDeleteResponse")
