# Writes the version header; run at build time so that the commit is that of the built tree.
execute_process(
  COMMAND git -C ${SOURCE_DIR} describe --always --dirty --abbrev=10 --exclude=*
  OUTPUT_VARIABLE MOESAIC_COMMIT
  OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET
  RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  set(MOESAIC_COMMIT "")
endif()
configure_file(${TEMPLATE} ${OUTPUT} @ONLY)
