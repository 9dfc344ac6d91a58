"""Reads a file in every way a program can, on command: one line in, one line out.

A line is METHOD OFFSET LENGTH; the answer is the one byte that all bytes read are, or "blend A B", or the name of an errno.
Whoever reads a mapping whose page cannot be had dies of SIGBUS, as any program would.
"""
import ctypes, errno, mmap, os, sys, tempfile

fd = direct = private = shared = -1
size = 0


def only(data, want=None):
    if want is not None and len(data) != want:
        return "short %d" % len(data)
    if not data:
        return "empty"
    if data.count(data[0]) != len(data):
        other = next(byte for byte in data if byte != data[0])
        return "blend %d %d" % (data[0], other)
    return str(data[0])


def opened(path):
    global fd, direct, size
    fd = os.open(path, os.O_RDONLY)
    direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    # Two opens may be of two versions: then the first is taken again.
    if os.fstat(fd).st_ino != os.fstat(direct).st_ino:
        closed()
        return opened(path)
    size = os.fstat(fd).st_size
    return "ok %d %d" % (os.fstat(fd).st_ino, size)


def closed():
    global fd, direct, private, shared
    for mapping in (private, shared):
        if mapping != -1:
            mapping.close()
    for number in (fd, direct):
        if number != -1:
            os.close(number)
    fd = direct = private = shared = -1
    return "ok"


def mapped(kind):
    global private, shared
    if kind == "private":
        if private == -1:
            private = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ)
        return private
    if shared == -1:
        shared = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    return shared


def call(method, offset, length):
    want = min(length, max(size - offset, 0))
    if method == "pread":
        return only(os.pread(fd, length, offset), want)
    if method == "read":
        os.lseek(fd, offset, os.SEEK_SET)
        return only(os.read(fd, length), want)
    if method == "readv":
        parts = [bytearray(length // 3 + 1), bytearray(length - length // 3)]
        got = os.preadv(fd, parts, offset)
        return only((bytes(parts[0]) + bytes(parts[1]))[:got], min(length + 1, max(size - offset, 0)))
    if method == "direct":
        offset -= offset % 4096
        buffer = mmap.mmap(-1, (length + 4095) // 4096 * 4096)
        got = os.preadv(direct, [buffer], offset)
        return only(buffer[:got], min(len(buffer), size - offset))
    if method in ("private", "shared"):
        return only(mapped(method)[offset:offset + length], want)
    if method == "sendfile":
        with tempfile.TemporaryFile() as out:
            sent = 0
            while sent < want:
                more = os.sendfile(out.fileno(), fd, offset + sent, want - sent)
                if more == 0:
                    break
                sent += more
            return only(os.pread(out.fileno(), want, 0), want)
    if method == "splice":
        ours, theirs = os.pipe()
        try:
            length = min(want, 65536)
            moved = os.splice(fd, theirs, length, offset_src=offset)
            return only(os.read(ours, moved))
        finally:
            os.close(ours)
            os.close(theirs)
    if method == "copy":
        with tempfile.TemporaryFile() as out:
            moved = os.copy_file_range(fd, out.fileno(), want, offset, 0)
            return only(os.pread(out.fileno(), moved, 0))
    if method == "fstat":
        return str(os.fstat(fd).st_ino)
    return "no such method"


for line in sys.stdin:
    words = line.split()
    try:
        if words[0] == "open":
            answer = opened(words[1])
        elif words[0] == "close":
            answer = closed()
        else:
            answer = call(words[0], int(words[1]), int(words[2]))
    except OSError as error:
        answer = errno.errorcode.get(error.errno, str(error))
        if words[0] == "open":
            closed()
    print(answer, flush=True)
